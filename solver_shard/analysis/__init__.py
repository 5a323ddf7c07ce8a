"""Questions asked of plans: why is it so, what would it cost otherwise, how do other plans compare, what if the mesh were another."""

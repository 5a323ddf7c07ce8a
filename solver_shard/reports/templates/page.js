// Search, selection, folding, sorting, the chart's readout and the theme. Text goes in by textContent alone.
(function () {
  "use strict";
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const root = document.documentElement;

  // ---- theme -----------------------------------------------------------------------------------------------------------
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);
  function showTheme() {
    $("theme").textContent = isDark() ? "Light theme" : "Dark theme";
  }
  $("theme").addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    showTheme();
  });
  dark.addEventListener("change", showTheme);
  showTheme();

  // ---- the explanation of a tensor -------------------------------------------------------------------------------------
  const panel = $("panel");
  let opener = null;
  function select(id, member) {
    const template = $("entry-" + id);
    if (!template) return;
    panel.replaceChildren(template.content.cloneNode(true));
    if (member && member !== data.entries[id].name) {
      const note = document.createElement("p");
      note.className = "member";
      note.textContent = member;
      panel.querySelector("h2").after(note);
    }
    const close = document.createElement("button");
    close.type = "button";
    close.className = "close";
    close.textContent = "Close";
    close.addEventListener("click", closePanel);
    panel.prepend(close);
    document.querySelectorAll(".selected").forEach((e) => e.classList.remove("selected"));
    document.querySelectorAll("main [data-entry='" + id + "']").forEach((e) => e.classList.add("selected"));
    root.classList.add("explaining");
    $("aside").scrollTop = 0;
    panel.querySelector("h2").focus({ preventScroll: true });
  }
  function closePanel() {
    root.classList.remove("explaining");
    panel.replaceChildren();
    document.querySelectorAll(".selected").forEach((e) => e.classList.remove("selected"));
    if (opener && opener.isConnected) opener.focus();
  }
  function choose(target) {
    if (!panel.contains(target)) opener = target;
    select(Number(target.dataset.entry));
  }
  document.addEventListener("click", (event) => {
    const target = event.target.closest("[data-entry]");
    if (target) choose(target);
  });
  document.addEventListener("keydown", (event) => {
    const target = event.target;
    if ((event.key === "Enter" || event.key === " ") && target.matches("g[data-entry]")) {
      event.preventDefault();
      choose(target);
    } else if (event.key === "/" && !event.ctrlKey && !event.metaKey && !event.altKey && !target.matches("input, textarea")) {
      event.preventDefault();
      $("search").focus();
      $("search").select();
    } else if (event.key === "Escape" && root.classList.contains("explaining") && target !== $("search")) {
      closePanel();
    }
  });

  // ---- search ------------------------------------------------------------------------------------------------------------
  const names = data.entries.map((entry) =>
    (entry.numbers || [null]).map((numbers) =>
      numbers ? entry.pieces.reduce((text, piece, k) => text + numbers[k - 1] + piece) : entry.name
    )
  );
  const rank = { parameter: 0, input: 1, output: 1, buffer: 2, activation: 3, gradient: 4 };
  function find(query) {
    const words = query.toLowerCase().split(/\s+/).filter(Boolean);
    if (!words.length) return [];
    const found = [];
    data.entries.forEach((entry, id) => {
      const folded = entry.name.toLowerCase();
      const whole = words.every((word) => folded.includes(word) || entry.layout.toLowerCase() === word);
      const member = whole ? entry.name : names[id].find((name) => words.every((word) => within(name.toLowerCase(), word)));
      if (member === undefined) return;
      const ends = folded.endsWith(words[words.length - 1]) ? 0 : 1;
      found.push({ id, member, order: [ends, rank[entry.role] ?? 5, entry.name.length, id] });
    });
    found.sort((a, b) => {
      for (let k = 0; k < a.order.length; k++) if (a.order[k] !== b.order[k]) return a.order[k] - b.order[k];
      return 0;
    });
    return found.slice(0, 14);
  }
  // "layers.1" is not a part of "layers.17": a number at an end of the word stands alone
  function within(name, word) {
    for (let at = name.indexOf(word); at >= 0; at = name.indexOf(word, at + 1)) {
      const before = name[at - 1], after = name[at + word.length];
      const digit = (c) => c !== undefined && c >= "0" && c <= "9";
      if (!(digit(word[0]) && digit(before)) && !(digit(word[word.length - 1]) && digit(after))) return true;
    }
    return false;
  }
  const input = $("search"), list = $("found");
  let results = [], active = -1;
  function showResults() {
    results = find(input.value);
    active = results.length ? 0 : -1;
    list.replaceChildren(
      ...results.map((result, k) => {
        const item = document.createElement("li");
        item.id = "found-" + k;
        item.role = "option";
        const name = document.createElement("span");
        name.textContent = result.member;
        const layout = document.createElement("span");
        layout.className = "layout";
        layout.textContent = data.entries[result.id].layout;
        const role = document.createElement("span");
        role.className = "role";
        role.textContent = data.entries[result.id].role;
        item.append(name, layout, role);
        item.addEventListener("mousedown", (event) => event.preventDefault());
        item.addEventListener("click", () => accept(k));
        return item;
      })
    );
    if (input.value.trim() && !results.length) {
      const none = document.createElement("li");
      none.className = "none";
      none.textContent = "No tensor of this plan has that in its name";
      list.append(none);
    }
    const open = Boolean(input.value.trim());
    list.hidden = !open;
    input.setAttribute("aria-expanded", String(open));
    mark();
  }
  function mark() {
    [...list.children].forEach((item, k) => item.setAttribute("aria-selected", String(k === active)));
    if (active >= 0) {
      input.setAttribute("aria-activedescendant", "found-" + active);
      list.children[active].scrollIntoView({ block: "nearest" });
    } else input.removeAttribute("aria-activedescendant");
  }
  function hide() {
    list.hidden = true;
    input.setAttribute("aria-expanded", "false");
    input.removeAttribute("aria-activedescendant");
  }
  function accept(k) {
    const result = results[k];
    if (!result) return;
    hide();
    opener = input;
    select(result.id, result.member);
  }
  input.addEventListener("input", showResults);
  input.addEventListener("focus", () => input.value && showResults());
  input.addEventListener("blur", hide);
  input.addEventListener("keydown", (event) => {
    if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      event.preventDefault();
      if (list.hidden) return showResults();
      const count = results.length;
      if (count) active = (active + (event.key === "ArrowDown" ? 1 : count - 1)) % count;
      mark();
    } else if (event.key === "Enter") {
      event.preventDefault();
      accept(active);
    } else if (event.key === "Escape") {
      if (list.hidden) input.value = "";
      hide();
    }
  });

  // ---- folding -----------------------------------------------------------------------------------------------------------
  const folds = [...document.querySelectorAll(".tree details")];
  $("fold").addEventListener("click", () => {
    const open = folds.some((e) => !e.open);
    folds.forEach((e) => (e.open = open));
    showFold();
  });
  function showFold() {
    $("fold").textContent = folds.some((e) => !e.open) ? "Unfold all" : "Fold all";
  }
  folds.forEach((e) => e.addEventListener("toggle", showFold));
  showFold();
  let closed = [];
  window.addEventListener("beforeprint", () => {
    closed = [...document.querySelectorAll("details:not([open])")];
    closed.forEach((e) => (e.open = true));
  });
  window.addEventListener("afterprint", () => closed.forEach((e) => (e.open = false)));

  // ---- sorting -----------------------------------------------------------------------------------------------------------
  document.querySelectorAll("table.sortable").forEach((table) => {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = head.textContent;
      head.replaceChildren(button);
      button.addEventListener("click", () => {
        const numeric = head.classList.contains("num");
        const was = head.getAttribute("aria-sort");
        const down = was ? was === "ascending" : numeric;
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const value = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
        const rows = [...table.tBodies[0].rows];
        const ordered = (a, b) => (isNaN(a) || isNaN(b) ? String(a).localeCompare(String(b)) : Number(a) - Number(b));
        rows.sort((a, b) => (down ? -1 : 1) * ordered(value(a), value(b)));
        table.tBodies[0].append(...rows);
      });
    });
  });

  // ---- reading the memory chart -----------------------------------------------------------------------------------------
  const chart = document.querySelector("#memory-chart svg"), readout = $("memory-readout"), cursor = $("memory-cursor");
  const { edges, at, values } = data.columns;
  let column = 0;
  const size = (bytes) => {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let k = 0;
    for (; Math.abs(bytes) >= 999.5 && k < units.length - 1; k++) bytes /= 1024;
    return bytes.toFixed(k === 0 || bytes >= 99.95 ? 0 : bytes >= 9.995 ? 1 : 2) + " " + units[k];
  };
  function read(k) {
    column = Math.max(0, Math.min(values.length - 1, k));
    const parts = data.names.map((name, i) => [name, values[column][i]]).filter((part) => part[1]).reverse();
    const total = parts.reduce((sum, part) => sum + part[1], 0);
    readout.textContent = "op " + at[column] + ": " + size(total) + (parts.length ? " = " : "") + parts.map((part) => part[0] + " " + size(part[1])).join(" + ");
    cursor.removeAttribute("hidden");
    cursor.setAttribute("transform", "translate(" + (edges[column] + edges[column + 1]) / 2 + " 0)");
  }
  chart.addEventListener("pointermove", (event) => {
    const box = chart.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * chart.viewBox.baseVal.width;
    let k = edges.findIndex((edge) => edge > x);
    read((k < 0 ? edges.length : k) - 1);
  });
  chart.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20 }[event.key];
    if (step) read(column + step);
    else if (event.key === "Home") read(0);
    else if (event.key === "End") read(values.length - 1);
    else return;
    event.preventDefault();
  });

  root.dataset.ready = String(Math.round(performance.now()));
})();

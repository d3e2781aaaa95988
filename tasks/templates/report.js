// A run's page without this script is whole but for sorting and narrowing down; see report.html.jinja.
"use strict";
(() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const one = (selector, root = document) => root.querySelector(selector);

  // ---- Numbers and dates as the reader's locale writes them ----------------------------------------------------------

  const digits = (count, more = {}) => ({ minimumFractionDigits: count, maximumFractionDigits: count, ...more });
  const FORMS = {
    pairs: digits(0),
    share: digits(1, { style: "percent" }),
    tick: { style: "percent", maximumFractionDigits: 2 },
    points: digits(1),
    score: digits(3),
    "axis score": digits(2),
    "pairs/s": digits(1),
  };
  const DATES = {
    moment: { dateStyle: "medium", timeStyle: "short" },
    day: { dateStyle: "medium" },
    "axis day": { day: "numeric", month: "short" },
  };
  const made = new Map();
  const format = (kind, options, value) => {
    const key = JSON.stringify(options);
    if (!made.has(key)) made.set(key, new kind(undefined, options));
    return made.get(key).format(value);
  };

  const number = (value, form, signed = false) => {
    const signs = signed ? { signDisplay: "exceptZero" } : {};
    if (form === "s") return duration(value, signs);
    if (form === "points") value *= 100;
    return format(Intl.NumberFormat, { ...FORMS[form], ...signs }, value);
  };

  // The same steps as `duration` in tasks/report_page.py.
  const duration = (value, signs) => {
    const part = (count, unit, more = digits(0)) =>
      format(Intl.NumberFormat, { style: "unit", unit, unitDisplay: "short", ...more }, count);
    const seconds = Math.abs(value);
    if (seconds < 1) return part(Math.round(value * 1000), "millisecond", { ...digits(0), ...signs });
    if (seconds < 59.95) return part(value, "second", digits(1, signs));
    const sign = Math.sign(value);
    const whole = Math.round(seconds);
    const [hours, minutes, rest] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
    const first = { ...digits(0), ...signs };
    return hours
      ? `${part(sign * hours, "hour", first)} ${part(minutes, "minute")}`
      : `${part(sign * minutes, "minute", first)} ${part(rest, "second")}`;
  };

  for (const element of all("data[data-as]")) {
    element.textContent = number(Number(element.value), element.dataset.as, "signed" in element.dataset);
  }
  for (const element of all("text[data-n]")) {
    element.textContent = number(Number(element.dataset.n), element.dataset.as);
  }
  for (const element of all("time[data-as]")) {
    element.textContent = format(Intl.DateTimeFormat, DATES[element.dataset.as], new Date(element.dateTime));
  }
  for (const element of all("text[data-t]")) {
    element.textContent = format(Intl.DateTimeFormat, DATES["axis day"], new Date(element.dataset.t));
  }

  // ---- Pictures of what is prohibited --------------------------------------------------------------------------------

  for (const veil of all(".veil")) {
    veil.addEventListener("click", () => {
      veil.setAttribute("aria-pressed", String(veil.getAttribute("aria-pressed") !== "true"));
    });
  }

  // ---- Cards: sorted, narrowed down, and the same as SQL -------------------------------------------------------------

  const form = one(".controls");
  if (!form) return;

  // Cards that are shown before the reader asks for all.
  const FEW = 12;
  const list = one(".cards");
  const count = one(".count");
  const nothing = one(".nothing");
  const more = one(".all");
  const sql = one(".sql pre");
  const sort = one("[name=sort]", form);
  const filters = all("[name=filter]", form);
  const cards = all(".card", list).map((element, place) => ({
    element,
    place,
    score: Number(element.dataset.score),
    values: JSON.parse(element.dataset.values),
    text: one("h3", element).textContent,
  }));
  let everything = false;

  const chosen = () =>
    filters
      .filter((filter) => !("all" in filter.selectedOptions[0].dataset))
      .map((filter) => ({ ...filter.dataset, value: filter.value }));

  const order = () => {
    const place = sort.selectedOptions[0].dataset.place;
    if (sort.value === "score") return (a, b) => b.score - a.score;
    if (sort.value === "close") return (a, b) => a.score - b.score;
    if (sort.value === "text") return (a, b) => a.text.localeCompare(b.text);
    // What has no value comes last.
    const value = (card) => card.values[place] ?? "\uffff";
    return place === undefined ? () => 0 : (a, b) => value(a).localeCompare(value(b));
  };

  // A value as a string constant of Postgres. What a reader cannot see is spelt out there too, so that the question
  // that is read is the question that is asked.
  const constant = (value) => {
    const quoted = value.replaceAll("'", "''");
    if (!/[\p{C}\p{Zl}\p{Zp}]/u.test(value)) return `'${quoted}'`;
    const spelt = quoted
      .replaceAll("\\", "\\\\")
      .replace(/[\p{C}\p{Zl}\p{Zp}]/gu, (odd) => `\\+${odd.codePointAt(0).toString(16).padStart(6, "0")}`);
    return `U&'${spelt}'`;
  };

  const show = () => {
    const wanted = chosen();
    const fitting = cards.filter((card) => wanted.every(({ place, value }) => card.values[place] === value));
    const compare = order();
    fitting.sort((a, b) => compare(a, b) || a.place - b.place);
    const shown = new Set(everything ? fitting : fitting.slice(0, FEW));
    for (const card of cards) card.element.classList.toggle("out", !fitting.includes(card));
    for (const card of cards) card.element.classList.toggle("later", fitting.includes(card) && !shown.has(card));
    // Moved only where their order changes: a card that is moved forgets who has the focus.
    const placed = [...fitting, ...cards.filter((card) => !fitting.includes(card))];
    placed.forEach((card, place) => {
      if (list.children[place] !== card.element) list.insertBefore(card.element, list.children[place]);
    });
    const fits = number(fitting.length, "pairs");
    const of = fitting.length < cards.length ? `${fits} of ${number(cards.length, "pairs")}` : fits;
    const some = shown.size < fitting.length ? `, the first ${number(shown.size, "pairs")} shown` : "";
    count.textContent = `${of} mismatches${some}`;
    nothing.hidden = fitting.length > 0;
    more.hidden = shown.size === fitting.length;
    more.textContent = `Show all ${fits}`;
    const conditions = wanted.map(({ column, value }) => `\n  and ${column} = ${constant(value)}`).join("");
    sql.textContent = `${sql.dataset.select}${conditions}\n${sql.dataset.order}`;
  };

  // What is chosen stands in the address, so that a view can be shared: #a.category=food&sort=score
  const remember = () => {
    const state = new URLSearchParams(chosen().map(({ key, value }) => [key, value]));
    if (sort.value) state.set("sort", sort.value);
    if (everything) state.set("show", "all");
    const hash = String(state);
    history.replaceState(null, "", hash ? `#${hash}` : location.pathname + location.search);
  };

  const recall = () => {
    // A plain anchor, such as #errors, leaves the view as it is.
    if (location.hash && !location.hash.includes("=")) return;
    const state = new URLSearchParams(location.hash.slice(1));
    for (const filter of filters) {
      const value = state.get(filter.dataset.key);
      const options = [...filter.options];
      filter.selectedIndex = Math.max(
        0,
        options.findIndex((option) => value !== null && !("all" in option.dataset) && option.value === value),
      );
    }
    const sorts = [...sort.options].map((option) => option.value);
    sort.selectedIndex = Math.max(0, sorts.indexOf(state.get("sort") ?? ""));
    everything = state.get("show") === "all";
  };

  const changed = () => {
    remember();
    show();
  };
  form.addEventListener("change", changed);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", () => {
    everything = false;
    // The fields are empty only after this event.
    setTimeout(changed);
  });
  more.addEventListener("click", () => {
    const next = cards.find((card) => card.element.classList.contains("later"));
    everything = true;
    changed();
    // The button is gone: whoever came by keyboard goes on with the first card that was not there before.
    next.element.tabIndex = -1;
    next.element.focus({ preventScroll: true });
  });
  addEventListener("hashchange", () => {
    recall();
    show();
  });

  const copy = one(".copy");
  const copied = one(".copied");
  copy.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(sql.textContent);
      copied.textContent = "Copied.";
    } catch {
      // A browser that does not allow it: the text is selected, and Ctrl-C copies it.
      getSelection().selectAllChildren(sql);
      copied.textContent = "Selected: copy it from the keyboard.";
    }
  });

  form.hidden = copy.hidden = false;
  recall();
  show();
})();

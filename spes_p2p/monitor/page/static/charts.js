"use strict";
// Line charts: uPlot with a key that names each line and its value, under the pointer or the arrow keys.
// A line is {name, colour: 1 to 5, dash, stepped, gaps, shown}.

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const element = (tag, words, ...names) => {
  const made = document.createElement(tag);
  if (words !== undefined) made.textContent = words;
  made.classList.add(...names);
  return made;
};
const WHOLE = Array.from({ length: 13 }, (_, i) => [1, 2, 5].map((step) => step * 10 ** i)).flat();
const UNITS = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
const unitOf = (value) => UNITS.find(([size]) => Math.abs(value) >= size) || [1, ""];
function short(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  const [unit, letter] = unitOf(+value.toPrecision(digits));
  const scaled = value / unit;
  return (Number.isInteger(scaled) && Math.abs(scaled) < 1000 ? String(scaled) : scaled.toPrecision(digits)) + letter;
}

// The labels of an axis, in one unit, with the digits that tell neighbours apart.
function labels(splits) {
  const known = splits.filter((value) => value !== null), [unit, letter] = unitOf(Math.max(...known.map(Math.abs)));
  const step = known.length > 1 ? (known[1] - known[0]) / unit : 1;
  let digits = 0;
  while (digits < 6 && Math.abs(step * 10 ** digits - Math.round(step * 10 ** digits)) > 1e-6) digits += 1;
  return splits.map((value) => (value === null ? "" : value ? (value / unit).toFixed(digits) + letter : "0"));
}

class Chart {
  constructor(parent, { title, help, unit, lines }) {
    this.lines = lines;
    this.title = title;
    const card = element("section");
    const head = element("h2");
    const name = element("button", title, "what");
    name.type = "button";
    name.dataset.help = help;
    head.append(name, " ", element("small", unit));
    this.tools = element("span", undefined, "choice");
    head.append(" ", this.tools);
    this.box = element("div", undefined, "chart");
    this.box.tabIndex = 0;
    this.box.setAttribute("role", "img");
    this.key = element("p", undefined, "key");
    this.where = element("span", "");
    this.values = lines.map((line) => {
      const entry = element("span");
      entry.append(element("i", undefined, "line", `c${line.colour}`, ...(line.dash ? ["dash"] : [])), line.name, " ");
      const value = element("b");
      entry.append(value);
      this.key.append(entry);
      return value;
    });
    this.key.prepend(this.where);
    card.append(head, this.box, this.key);
    parent.append(card);
    this.box.addEventListener("keydown", (event) => this.move(event));
    this.box.addEventListener("blur", () => this.tell(null));
    new ResizeObserver(() => this.plot && this.plot.setSize(this.size())).observe(this.box);
  }

  size() { return { width: Math.max(80, this.box.clientWidth), height: 190 }; }

  // data: [xs, ...ys]; xs ascend.
  draw(data, xName) {
    this.data = data;
    this.xName = xName;
    const spoken = this.lines.map((line, i) => {
      const known = data[i + 1].filter((value) => value !== null && value !== undefined);
      return known.length ? `${line.name} ${short(known[0], 4)} at first, ${short(known.at(-1), 4)} at last` : `${line.name}: none`;
    });
    this.box.setAttribute("aria-label", `${this.title} over ${xName}: ${spoken.join("; ")}`);
    if (this.plot) this.plot.setData(data);
    else this.plot = new uPlot(this.options(), data, this.box);
    if (!this.isPointed) this.tell(null);
  }

  options() {
    const axis = {
      stroke: () => style("--soft"), font: "11px system-ui", grid: { stroke: () => style("--line"), width: 1 },
      ticks: { show: false }, values: (plot, splits) => labels(splits),
    };
    const rounds = (plot, splits) => (this.xName === "round" ? splits.map(String) : labels(splits));
    return {
      ...this.size(), legend: { show: false }, padding: [8, 10, 0, 0], scales: { x: { time: false } },
      cursor: { y: false, points: { size: 6 }, drag: { x: false, y: false } },
      axes: [{ ...axis, size: 26, space: 60, incrs: WHOLE, values: rounds }, { ...axis, size: 42, space: 32, incrs: this.lines[0].stepped ? WHOLE : undefined }],
      series: [{}, ...this.lines.map((line) => ({
        stroke: () => style(line.filled ? "--card" : `--c${line.colour}`), width: line.filled ? 1 : 2, dash: line.dash ? [6, 4] : undefined, spanGaps: !line.gaps,
        paths: line.stepped ? uPlot.paths.stepped({ align: 1 }) : undefined,
        fill: line.filled ? () => style(`--c${line.colour}`) : undefined,
        points: { show: (plot) => plot.data[0].length < 3 || line.points === true, size: 4 },
      }))],
      hooks: { setCursor: [(plot) => this.tell(plot.cursor.idx)] },
    };
  }

  // Write the values of a point, or of the newest, into the key.
  tell(index) {
    if (!this.data) return;
    this.isPointed = index !== null && index !== undefined;
    const [xs, ...ys] = this.data;
    const place = this.xName === "round" ? String(xs[index]) : short(xs[index], 4);
    this.where.textContent = this.isPointed ? `${this.xName} ${place}: ` : "";
    ys.forEach((values, i) => {
      const own = this.lines[i].shown ? this.lines[i].shown(values, ys, i) : values;
      let at = this.isPointed ? index : own.length - 1;
      while (!this.isPointed && at > 0 && (own[at] === null || own[at] === undefined)) at -= 1;
      this.values[i].textContent = short(own[at], 4);
    });
  }

  move(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (!step || !this.plot) return;
    event.preventDefault();
    const last = this.data[0].length - 1;
    const from = this.plot.cursor.idx ?? last + (step < 0 ? 1 : 0);
    const at = Math.min(last, Math.max(0, from + step));
    this.plot.setCursor({ left: this.plot.valToPos(this.data[0][at], "x"), top: 10 });
    this.tell(at);
    tell("spoken", this.key.textContent);
  }

  redraw() { if (this.plot) this.plot.redraw(false, true); }
}

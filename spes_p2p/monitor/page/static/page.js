"use strict";
// Shows what /state.json has, or in a report what stands in the page itself. Whatever comes from peers is set by
// textContent alone, never as markup.

const at = (id) => document.getElementById(id);
// A screen reader speaks these places when their words change, and only then.
const tell = (id, words) => { if (at(id).textContent !== words) at(id).textContent = words; };
const HELP = {
  tokens: "Tokens that the certificates of the rounds name, of all rounds that this page knows. A token is about three quarters of a word.",
  speed: "Tokens of the newest round over its wall time, synchronisation included.",
  left: "Rounds left times the newest round's time, and the tokens of a day at its speed.",
  per_param: "Tokens per active parameter at the run's end, if all rounds to come are like the newest. Without experts, 20 make the best model for its computation (Chinchilla, arXiv 2203.15556).",
  loss: "Mean cross entropy on the text that the peers train on, in nats per token, the voters' median. Lower is better.",
  held_out: "Cross entropy of the swarm's model on text that no peer trains on, in nats per token. Lower is better; the small figure is the start's, or those of the sources.",
  active: "Peers that train now. A peer that joins first downloads the model.",
  sent: "What all peers have sent since each of them started, as they report it.",
  agreed: "Rounds after which all members reported the same digest of the shared parameters, of those with reports.",
  not_training: "Share of the newest round's wall time that the median peer did not train, but waited, averaged and exchanged.",
  covered: "Slots with at least one holder, of all. A slot is one expert of every layer.",
  my_tokens: "Tokens on which this machine has trained in this run.",
  share: "This machine's part of the swarm's tokens since it started. Of one machine, at most four times the median of the round counts.",
  traffic: "What this machine has sent and received since its start.",
  uptime: "Time since this process joined.",
  memory: "Memory of this process and its helpers; what they share counts once.",
  reach: "Whether other peers can open a connection to this one, and how many it knows to be within reach. One that calls others only trains all the same.",
  phase: "A round: peers train, then meet, average what they have trained, and exchange slots. The time left of training is the certificate's; that of the rest is the newest round's.",
  coverage: "How many peers hold each slot. A slot with no holder is not trained until a peer takes it; with one holder, that peer's failure loses at most its newest round.",
  losses: "Training loss is what peers report on their own text; held-out loss is measured by a monitor on text that no peer trains on.",
  speeds: "Tokens per second of the whole swarm: with the time spent synchronising, and of the training alone.",
  phases: "Seconds of a round at the median peer, by what it did. Matchmaking is waiting for each other.",
  peers_chart: "Members of each round, as its certificate names them.",
  mine: "Tokens that this machine trained in each committed round.",
  samples: "The model of each evaluated round continues the beginning of a held-out text, or replies to the first turn of held-out conversations, with its most likely token each time.",
  given: "Tokens of this machine that counted, by the certificates of the rounds that it has seen.",
  credit: "Thank you. Tokens that counted, by the certificates of the rounds that this machine has seen, and never by what a peer reports. A name is what its owner has set.",
  peers: "Peers by the end of their ids. Figures are what each peer reports about itself; \"not training\" is the share of its last round spent waiting, averaging and exchanging. On a peer's own page \"link\" says how it reaches the other: by a direct call, met through both routers by an introduction, or through others, and \"votes\" by which of the founder's invites it votes on what counts.",
  controls: "What you have asked of this machine. An empty field is the default; a change takes effect within one step, the number of slots with the next round, the upload rate with the next start.",
  events: "What happened, newest first, in this device's time.",
};
const percent = (value) => (value === null || value === undefined ? "–" : `${+(100 * value).toPrecision(3)} %`);
const bytes = (value) => (value === null || value === undefined ? "–" : `${short(value)}B`);
const duration = (seconds) => {
  const minutes = Math.floor(seconds / 60), hours = Math.floor(minutes / 60);
  return hours > 48 ? `${Math.floor(hours / 24)} days` : hours ? `${hours} h ${minutes % 60} min` : minutes ? `${minutes} min` : `${Math.round(seconds)} s`;
};
// Key, label, value, small print, whether only a peer (true) or only a monitor (false) has it.
const TILES = [
  ["my_tokens", "my tokens", (f) => short(f.my_tokens), null, true],
  ["given", "given, and counted", (f) => short(f.given), null, true],
  ["share", "my share", (f) => percent(f.share), null, true],
  ["traffic", "sent / received", (f) => `${bytes(f.my_sent)} / ${bytes(f.my_received)}`, null, true],
  ["memory", "memory", (f) => bytes(f.memory), null, true],
  ["uptime", "running for", (f) => duration(f.uptime || 0), null, true],
  ["reach", "reachable", (f) => f.reach || "–", null, true],
  ["tokens", "swarm's tokens", (f) => short(f.tokens), (f) => (f.since > 1 ? `since round ${f.since}` : "")],
  ["speed", "tokens per second", (f) => short(f.speed)],
  ["left", "time to the end", (f) => (f.left === undefined ? "–" : duration(f.left)), (f) => (f.left === undefined ? "" : `${short(f.a_day)} tokens a day`)],
  ["per_param", "tokens per parameter", (f) => short(f.per_param), () => "Chinchilla: 20"],
  ["loss", "training loss", (f) => short(f.loss, 4)],
  ["held_out", "held-out loss", (f) => short(f.held_out, 4), (f) => f.held_out_sources || (f.held_out_first === null ? "" : `${short(f.held_out_first, 4)} at first`), false],
  ["active", "peers", (f) => String(f.active), (f) => (f.joining ? `${f.joining} joining` : "")],
  ["sent", "sent by all", (f) => bytes(f.sent), null, false],
  ["not_training", "time not training", (f) => percent(f.not_training), null, false],
  ["agreed", "digests agreed", (f) => `${f.agreed} of ${f.rounds}`, null, false],
];

const data = {};          // sections by name, as the server has them
const texts = {};         // each as text, by which a change is found
let columns = {};         // index of a round's value by name
let overTokens = false;
let isReport = false;
let heard = 0;            // when the newest answer was true
let clockAt = 0;          // when the newest data was true, by which the swarm's clock goes on
let isLost = false;
let charts = null;

// Show the sections that have changed.
function receive(state) {
  const began = performance.now();
  const changed = Object.keys(state).filter((name) => texts[name] !== (texts[name] = JSON.stringify(state[name])));
  for (const name of changed) data[name] = state[name];
  clockAt = heard;
  const has = (...names) => names.some((name) => changed.includes(name));
  if (has("run")) showRun();
  showClock();
  if (has("figures")) showTiles();
  if (has("run", "coverage", "matrix")) showCoverage();
  if (has("matrix", "run")) matrix.change();
  if (has("rounds", "held_out", "baselines")) showCharts();
  if (has("peers", "figures")) showPeers();
  if (has("credit")) showCredit();
  if (has("events")) showEvents();
  if (has("control")) showControls();
  if (has("samples")) showSamples();
  window.spesTicks = (window.spesTicks || []).slice(-99).concat(performance.now() - began);
}

// ------------------------------------------------------------------ head

function showRun() {
  const run = data.run;
  columns = Object.fromEntries(run.columns.map((name, i) => [name, i]));
  at("run").textContent = run.id;
  at("who").textContent = run.me ? `peer …${run.me.slice(-6)}` : isReport ? "report" : "monitor";
  document.querySelector(".mine-key").hidden = !run.me;
  showLink(run.link, run.code);
  at("facts").replaceChildren(...[["model", run.model], ...Object.entries(run.facts)].filter(([, value]) => value).map(([name, value]) => element("p", `${name}: ${value}`)));
}

// The link by which others join; a page that others can read does not have it.
function showLink(link, rows) {
  at("join").hidden = !link || isReport;
  if (!link || isReport) return;
  at("link").textContent = `spes join ${link}`;
  const canvas = at("code"), pen = canvas.getContext("2d"), size = rows.length, edge = 4, scale = 4;
  canvas.width = canvas.height = (size + 2 * edge) * scale;
  pen.fillStyle = "#fff";
  pen.fillRect(0, 0, canvas.width, canvas.height);
  pen.fillStyle = "#000";
  rows.forEach((row, y) => {
    for (let x = 0; x < size; x += 1) {
      if ((parseInt(row[x >> 2], 16) >> (3 - (x & 3))) & 1) pen.fillRect((x + edge) * scale, (y + edge) * scale, scale, scale);
    }
  });
}

const GOOD = ["training", "finished", "synchronising", "serving"], BAD = ["silent", "offline", "alone", "waiting"];
// What a page that has lost its process says, by the process's last state.
const ENDS = { leaving: "left", finishing: "left", serving: "finished", finished: "finished" };
const SILENT_SECONDS = 60;  // a process shows its state every other second
function showClock() {
  if (!data.now) {
    at("why").textContent = isLost ? "this page's process does not answer; trying again" : "";
    return;
  }
  const { now, phases, run: { total, id } } = data;
  const age = (performance.now() - heard) / 1000, lost = !isReport && (isLost || age > SILENT_SECONDS);
  const end = isLost ? ENDS[now.state] : undefined;
  const state = lost ? end || "offline" : now.state;
  const time = now.at + (isReport ? 0 : (performance.now() - clockAt) / 1000);
  const pill = at("state");
  tell("state", state);
  pill.className = `pill ${GOOD.includes(state) ? "good" : BAD.includes(state) ? "bad" : ""}`;
  at("why").textContent = !lost ? now.why : end ? `${end === "left" ? "the peer has ended as asked" : "the run is finished"}; this page can be closed`
    : `${isLost ? "no connection to this page's process" : "this page's process says nothing"}; the figures are ${duration(age)} old`;
  document.title = `${state} · round ${now.round} of ${total} · ${id}`;
  const seconds = (names) => names.reduce((sum, name) => sum + (phases[name] || 0), 0);
  const train = phases.train || 0, rest = seconds(["matchmaking", "averaging", "exchange", "other"]);
  let words = `round ${now.round} of ${total}`, share = 0;
  const left = now.ends_at - time;
  if (["training", "synchronising"].includes(now.state) && now.ends_at) {
    if (left > 0) {
      share = train ? Math.min(1, Math.max(0, 1 - left / train)) : 0;
      words += ` · training, ${duration(Math.ceil(left))} left; then about ${duration(Math.ceil(rest))} to synchronise`;
    } else {
      share = rest ? Math.min(1, -left / rest) : 1;
      words += rest + left > 0 ? ` · synchronising, about ${duration(Math.ceil(rest + left))} left` : " · synchronising, longer than last time";
    }
  }
  at("clock").textContent = words;
  at("bar").style.width = `${100 * share}%`;
  at("bar").classList.toggle("sync", left <= 0);
  at("phase").hidden = isReport;
}

function showTiles() {
  const isPeer = Boolean(data.run.me), figures = data.figures;
  const shown = TILES.filter(([, , , , only]) => only === undefined || only === isPeer);
  if (!at("tiles").children.length) {
    at("tiles").append(...shown.map(([key, label]) => {
      const tile = element("div"), name = element("dt"), button = element("button", label, "what");
      button.type = "button";
      button.dataset.help = key;
      name.append(button);
      tile.append(name, element("dd"));
      return tile;
    }));
  }
  shown.forEach(([, , value, small], i) => {
    const cell = at("tiles").children[i].lastChild, words = small ? small(figures) : "";
    cell.textContent = value(figures);
    if (words) cell.append(element("small", words));
  });
}

// ------------------------------------------------------------------ slots

const ranges = (text) => text.split(",").filter(Boolean).flatMap((part) => {
  const [first, last = first] = part.split("-").map(Number);
  return Array.from({ length: last - first + 1 }, (_, i) => first + i);
});
const cellsOf = (text) => { const [trains, claims] = text.split("|").map(ranges); return new Map([...claims.map((s) => [s, "claims"]), ...trains.map((s) => [s, "trains"])]); };
const name = (key) => `…${key.slice(-6)}`;
let slotAt = null;

function showCoverage() {
  const strip = at("coverage"), { slots: total, me } = data.run;
  at("slots").hidden = total === 0;  // a dense model has none
  if (strip.children.length !== total) {
    strip.replaceChildren(...Array.from({ length: total }, () => element("i")));
    strip.classList.toggle("few", total <= 32);
  }
  const mine = me && data.matrix[me] ? cellsOf(data.matrix[me]) : new Map();
  for (let slot = 0; slot < total; slot += 1) {
    strip.children[slot].className = `h${Math.min(2, data.coverage[slot] || 0)}${mine.has(slot) ? " mine" : ""}${slot === slotAt ? " at" : ""}`;
  }
  const words = `${data.figures.covered} of ${total} slots have a holder, ${data.figures.single} just one`;
  at("coverage-words").textContent = words;
  strip.setAttribute("aria-label", words);
  if (slotAt !== null) tellSlot(slotAt);
}

function tellSlot(slot) {
  const cells = at("coverage").children;
  if (!(slot in cells)) return;
  if (slotAt !== null && cells[slotAt]) cells[slotAt].classList.remove("at");
  slotAt = slot;
  cells[slot].classList.add("at");
  const holders = Object.entries(data.matrix).filter(([, text]) => cellsOf(text).has(slot)).map(([key]) => name(key));
  const more = (data.coverage[slot] || 0) - holders.length;  // of a large swarm some peers are not shown
  if (more > 0) holders.push(holders.length ? `${more} more` : `${more} that are not shown`);
  tell("slot-words", `slot ${slot}: ${holders.length ? `held by ${holders.join(", ")}` : "no holder; it is trained again when a peer takes it"}`);
}

const NAME_ROW = 12;
const matrix = {
  rows: [], cells: new Map(), row: -1, slot: -1,

  change() {
    const me = data.run.me;
    const keys = Object.keys(data.matrix).sort((a, b) => (b === me) - (a === me) || (a < b ? -1 : 1));
    at("matrix-box").hidden = !keys.length;
    const isSame = this.pen && keys.join() === this.rows.join();
    this.rows = keys;
    if (!at("matrix-box").open) return;
    if (!isSame) this.draw();
    else keys.forEach((key, row) => this.drawRow(row, cellsOf(data.matrix[key])));
    this.say();
  },

  draw() {
    const { slots: total, me } = data.run, canvas = at("matrix");
    const room = at("slots").clientWidth - 90;
    this.size = Math.max(8, Math.min(24, Math.floor(room / total)));
    const ratio = window.devicePixelRatio || 1, height = NAME_ROW * (this.rows.length + 1);
    canvas.width = total * this.size * ratio;
    canvas.height = height * ratio;
    canvas.style.width = `${total * this.size}px`;
    canvas.style.height = `${height}px`;
    this.pen = canvas.getContext("2d");
    this.pen.scale(ratio, ratio);
    this.colours = Object.fromEntries(["trains", "claims", "empty", "soft", "ink"].map((key) => [key, style(`--${key}`)]));
    this.pen.font = "10px system-ui";
    this.pen.fillStyle = this.colours.soft;
    const step = Math.ceil(24 / this.size);
    for (let slot = 0; slot < total; slot += step) this.pen.fillText(String(slot), slot * this.size, 9);
    this.cells = new Map();
    at("names").replaceChildren(element("div", ""), ...this.rows.map((key) => element("div", name(key), ...(key === me ? ["me"] : []))));
    this.rows.forEach((key, row) => this.drawRow(row, cellsOf(data.matrix[key])));
    this.say();
  },

  // Paint the cells of a row that differ from what is painted.
  drawRow(row, cells) {
    const before = this.cells.get(row), top = NAME_ROW * (row + 1);
    for (let slot = 0; slot < data.run.slots; slot += 1) {
      const kind = cells.get(slot) || "empty";
      if (before && (before.get(slot) || "empty") === kind) continue;
      this.pen.fillStyle = this.colours[kind];
      this.pen.fillRect(slot * this.size, top, this.size - 1, NAME_ROW - 1);
      if (kind === "claims") {
        this.pen.fillStyle = this.colours.ink;
        this.pen.fillRect(slot * this.size + this.size / 2 - 1, top + 5, 2, 2);
      }
    }
    this.cells.set(row, cells);
  },

  say() {
    const held = [...this.cells.values()].reduce((sum, cells) => sum + cells.size, 0);
    at("matrix").setAttribute("aria-label", `${data.run.slots} slots by ${this.rows.length} peers, ${held} claims`);
    if (this.row >= 0) this.tell(this.row, this.slot);
  },

  tell(row, slot) {
    if (!this.rows[row] || slot < 0 || slot >= data.run.slots) return;
    [this.row, this.slot] = [row, slot];
    const kind = this.cells.get(row)?.get(slot);
    tell("cell-words", `peer ${name(this.rows[row])}, slot ${slot}: ${{ trains: "trains it", claims: "has claimed it" }[kind] || "does not hold it"}`);
  },
};

function listen() {
  const strip = at("coverage"), canvas = at("matrix");
  const pointed = (event) => { const slot = [...strip.children].indexOf(event.target); if (slot >= 0) tellSlot(slot); };
  const cell = (event) => matrix.tell(Math.floor(event.offsetY / NAME_ROW) - 1, Math.floor(event.offsetX / matrix.size));
  for (const kind of ["pointermove", "click"]) { strip.addEventListener(kind, pointed); canvas.addEventListener(kind, cell); }
  strip.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -32, ArrowDown: 32 }[event.key];
    if (!step) return;
    event.preventDefault();
    tellSlot(Math.min(strip.children.length - 1, Math.max(0, (slotAt ?? (step > 0 ? -1 : 1)) + step)));
  });
  canvas.addEventListener("keydown", (event) => {
    const [down, right] = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key] || [0, 0];
    if (!down && !right) return;
    event.preventDefault();
    matrix.tell(Math.max(0, matrix.row + down), Math.max(0, matrix.slot + right));
  });
  at("matrix-box").addEventListener("toggle", () => at("matrix-box").open && matrix.draw());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  window.addEventListener("resize", () => at("matrix-box").open && matrix.draw());
  listenForHelp();
}

function redraw() {
  if (charts) Object.values(charts).forEach((chart) => chart.redraw());
  if (at("matrix-box").open) matrix.draw();
}

// ------------------------------------------------------------------ charts

const PHASES = ["train", "matchmaking", "averaging", "exchange", "other"];
function makeCharts() {
  const grid = at("charts"), isPeer = Boolean(data.run.me);
  const baselines = Object.keys(data.baselines);
  const made = {
    loss: new Chart(grid, { title: "Loss", help: "losses", unit: "nats per token", lines: [
      { name: "training", colour: 1 },
      isPeer ? { name: "mine", colour: 3, dash: true } : { name: "held-out", colour: 2, points: true },
      ...baselines.map((name, i) => ({ name, colour: 3 + (i % 3), dash: true }))] }),
    speed: new Chart(grid, { title: "Speed", help: "speeds", unit: "tokens per second", lines: [
      { name: "in all", colour: 1 }, { name: "while training", colour: 2, dash: true }] }),
    phases: new Chart(grid, { title: "Time by phase", help: "phases", unit: "seconds", lines: PHASES.map((name, i) => ({
      name, colour: i + 1, filled: true, shown: (values, ys, at) => values.map((value, j) => (ys[at + 1] ? value - ys[at + 1][j] : value)) })) }),
    peers: new Chart(grid, { title: "Peers", help: "peers_chart", unit: "by round", lines: [{ name: "peers", colour: 1, stepped: true }] }),
  };
  if (isPeer) {
    made.mine = new Chart(grid, { title: "My contribution", help: "mine", unit: "by round", lines: [{ name: "tokens", colour: 3, stepped: true, gaps: true }] });
  }
  for (const [words, isTokens] of [["rounds", false], ["tokens", true]]) {
    const button = element("button", words);
    button.type = "button";
    button.setAttribute("aria-pressed", String(isTokens === overTokens));
    button.addEventListener("click", () => {
      overTokens = isTokens;
      for (const other of made.loss.tools.children) other.setAttribute("aria-pressed", String(other === button));
      showCharts();
    });
    made.loss.tools.append(button);
  }
  return made;
}

function showCharts() {
  charts ??= makeCharts();
  const rounds = Object.entries(data.rounds).map(([number, row]) => [Number(number), row]);
  const held = new Map(Object.entries(data.held_out).map(([number, value]) => [Number(number), value]));
  const of = (...names) => [rounds.map(([number]) => number), ...names.map((key) => rounds.map(([, row]) => row[columns[key]] ?? null))];
  charts.loss.draw(losses(rounds, held), overTokens ? "tokens" : "round");
  charts.speed.draw(of("speed", "training_speed"), "round");
  const [numbers, ...phases] = of(...PHASES);
  charts.phases.draw([numbers, ...phases.map((_, i) => numbers.map((_, j) => phases.slice(i).reduce((sum, values) => sum + (values[j] || 0), 0)))], "round");
  charts.peers.draw(of("peers"), "round");
  if (charts.mine) charts.mine.draw(of("my_tokens"), "round");
}

function losses(rounds, held) {
  const rows = new Map(rounds), numbers = [...new Set([...rows.keys(), ...held.keys()])].sort((a, b) => a - b);
  const xs = overTokens ? numbers.map((number) => (rows.get(number) || held.get(number))[0]) : numbers;
  const other = data.run.me ? (number) => rows.get(number)?.[columns.my_loss] : (number) => held.get(number)?.[1];
  const ys = [numbers.map((number) => rows.get(number)?.[columns.loss] ?? null), numbers.map((number) => other(number) ?? null)];
  const curves = Object.values(data.baselines);
  if (!overTokens) return [xs, ...ys, ...curves.map(() => xs.map(() => null))];
  return curves.length ? uPlot.join([[xs, ...ys], ...curves.map((curve) => [curve.map(([x]) => x), curve.map(([, y]) => y)])]) : [xs, ...ys];
}

// ------------------------------------------------------------------ peers, events, samples

const HEADS = ["peer", "state", "round", "tokens", "loss", "tokens/s", "not training", "dropped", "sent", "received"];
function showPeers() {
  const table = at("peers"), isOwn = Boolean(data.run.me); // a monitor's page says of no peer how it is reached
  const { known, votes } = data.figures, peers = Object.entries(data.peers);
  if (!table.tHead) {
    table.append(element("thead"), element("tbody"));
    table.tHead.insertRow().append(...[...HEADS, ...(isOwn ? ["votes", "link"] : []), "slots"].map((title) => { const cell = element("th", title); cell.scope = "col"; return cell; }));
  }
  at("peers-words").textContent = [known > peers.length ? `the first ${peers.length} of ${known}` : "", votes].filter(Boolean).join("; ");
  table.tBodies[0].replaceChildren(...peers.map(([key, [state, round, tokens, loss, speed, sync, dropped, sent, received, slots, vote, way]]) => {
    const row = element("tr");
    const cells = [name(key), state, String(round), short(tokens), short(loss, 4), short(speed), percent(sync), short(dropped), bytes(sent), bytes(received), ...(isOwn ? [vote, way] : []), slots];
    row.append(...cells.map((words) => element("td", words)));
    return row;
  }));
}

function showCredit() {
  const { told, peers } = data.credit;
  at("credit").hidden = !peers.length;
  at("credit-words").textContent = told;
  at("given").replaceChildren(...peers.map(([key, tokens, owner]) => element("li", `${owner ? `${owner}, ` : ""}${name(key)}: ${short(tokens)} tokens`)));
}

function showEvents() {
  const events = [...data.events].reverse().map(([time, words]) => {
    const item = element("li"), when = element("time", new Date(time * 1000).toLocaleTimeString());
    item.append(when, words);
    return item;
  });
  at("events").replaceChildren(...(events.length ? events : [element("li", "nothing yet")]));
}

function showSamples() {
  at("samples").hidden = !("prompt" in data.samples);
  const shown = [];
  for (let index = 0; ; index += 1) {
    const end = index ? `.${index}` : ""; // of several conversations
    const prompt = data.samples[`prompt${end}`];
    if (prompt === undefined) break;
    const sample = (head, text) => {
      const made = element("p");
      made.append(element("b", head), element("span", prompt), text);
      return made;
    };
    const of = (number) => data.samples[`${number}${end}`];
    const rounds = Object.keys(data.samples).map(Number).filter(Number.isInteger).filter((number) => of(number) !== undefined).sort((a, b) => b - a);
    const [newest, ...older] = rounds.map((number) => sample(`the model of round ${number}`, of(number)));
    const more = element("details");
    more.append(element("summary", "of earlier rounds"), ...older);
    shown.push(sample("the text itself", data.samples[`truth${end}`] || ""), newest || "", ...(older.length ? [more] : []));
  }
  at("texts").replaceChildren(...shown);
}

// ------------------------------------------------------------------ balloons

function listenForHelp() {
  const balloon = at("balloon");
  let owner = null;
  const place = () => {
    if (!owner) return;
    const box = owner.getBoundingClientRect(), own = balloon.getBoundingClientRect();
    balloon.style.left = `${Math.max(8, Math.min(box.left, innerWidth - own.width - 8))}px`;
    balloon.style.top = `${box.bottom + own.height + 10 < innerHeight ? box.bottom + 6 : Math.max(8, box.top - own.height - 6)}px`;
  };
  const show = (button) => {
    const words = HELP[button.dataset.help];
    if (!words) return;
    owner = button;
    balloon.textContent = words;
    balloon.showPopover();
    place();
    button.setAttribute("aria-describedby", "balloon");
  };
  const hide = () => {
    if (!owner) return;
    owner.removeAttribute("aria-describedby");
    owner = null;
    balloon.hidePopover();
  };
  for (const kind of ["pointerover", "focusin", "click"]) {
    document.addEventListener(kind, (event) => {
      const button = event.target.closest(".what");
      if (button) show(button);
      else if (kind !== "focusin") hide();
    });
  }
  document.addEventListener("focusout", hide);
  document.addEventListener("keydown", (event) => event.key === "Escape" && hide());
  document.addEventListener("scroll", place, true);
}

// ------------------------------------------------------------------ start

const POLL_MILLISECONDS = 2000, ANSWER_MILLISECONDS = 20000;
function start() {
  listen();
  const inline = at("data");
  if (inline) {
    isReport = true;
    overTokens = true;
    receive(JSON.parse(inline.textContent));
    return;
  }
  takeToken();
  window.addEventListener("hashchange", () => { takeToken(); showControls(); });  // a link that is opened in this tab
  poll("");
  setInterval(showClock, 1000);
}

// Ask for the state unless it is still the one with this tag; again after a pause.
async function poll(tag) {
  let state = null;
  try {
    const answer = await fetch("state.json", { headers: tag ? { "If-None-Match": tag } : {}, signal: AbortSignal.timeout(ANSWER_MILLISECONDS) });
    if (answer.status !== 304) state = await answer.json();
    heard = performance.now() - 1000 * Number(answer.headers.get("Age"));
    tag = answer.headers.get("ETag");
    isLost = false;
  } catch {
    isLost = true;
  }
  setTimeout(poll, POLL_MILLISECONDS, tag);
  if (state) receive(state);
  showClock();
}

start();

"use strict";
// A peer's verbs. The token comes with the link, after its #, which a browser never sends; it stays in this tab.

const TOKEN_KEY = "spes-token";
const VERBS = [
  ["pause", "Pause", {}, "", ["training", "finishing"]],
  ["pause", "Pause 1 h", { for: "1h" }, "", ["training"]],
  ["resume", "Resume", {}, "", ["paused", "finishing"]],
  ["finish", "Finish", {}, "End this peer after this round? Others take its slots over; start it again to go on.", ["training", "paused"]],
  ["leave", "Leave", {}, "End this peer now? What it has trained in this round is lost; others take its slots over.", ["training", "paused", "finishing"]],
];
// Verb, name, label, example.
const FIELDS = [
  ["set", "threads", "CPU threads", "all"], ["set", "slots", "most slots", "as started"], ["set", "duty", "share of the time", "100%"],
  ["set", "uplink_mbit", "upload, Mbit/s", "as started"], ["rules", "hours", "only in these hours", "mon-fri 22:00-07:00, sat-sun 00:00-24:00"],
  ["rules", "on_battery", "on battery, too", "yes"], ["rules", "programs", "not while these run", "blender, steam"], ["rules", "gb_a_day", "GB a day", "no limit"],
];
let token = "";

function takeToken() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given) {
    sessionStorage.setItem(TOKEN_KEY, given);
    history.replaceState(null, "", location.pathname);
  }
  token = sessionStorage.getItem(TOKEN_KEY) || "";
}

// Returns whether the peer took it.
async function ask(verb, values) {
  let isTaken = false;
  at("answer").textContent = `${verb} …`;
  try {
    const answer = await fetch(`control/${verb}`, { method: "POST", headers: { "X-Spes-Token": token }, body: Object.keys(values).length ? JSON.stringify(values) : undefined });
    const text = await answer.text();
    if (answer.status === 401) { sessionStorage.removeItem(TOKEN_KEY); token = ""; }
    isTaken = answer.ok;
    if (isTaken) data.control = JSON.parse(text);
    at("answer").textContent = answer.ok ? `${data.control.state}: ${data.control.reason}` : text.trim();
  } catch (error) {
    at("answer").textContent = `the peer does not answer: ${error.message}`;
  }
  at("answer").classList.toggle("refused", !isTaken);
  showControls();
  return isTaken;
}

const written = (value) => (value === null || value === undefined ? "" : Array.isArray(value) ? value.join(", ") : value === true ? "" : value === false ? "no" : String(value));

function makeFields() {
  at("fields").replaceChildren(...FIELDS.map(([verb, key, label, example]) => {
    const box = element("label", label), input = element("input");
    input.id = `field-${key}`;
    input.placeholder = example;
    input.autocomplete = "off";
    input.title = `for example ${example}; empty for the default`;
    input.addEventListener("change", async () => {
      input.setAttribute("aria-invalid", "true"); // until it is taken: what is refused stays, to be mended
      if (!(await ask(verb, { [key]: input.value.trim() || null }))) return;
      input.setAttribute("aria-invalid", "false");
      showControls();
    });
    box.append(input);
    return box;
  }));
}

function showControls() {
  const control = data.control, isOn = Boolean(control?.state) && !isReport;
  at("controls").hidden = at("settings").hidden = !isOn;
  if (!isOn) return;
  at("limits").hidden = !token;
  if (!token) {
    at("controls").hidden = true;
    at("answer").textContent = "To pause, resume or limit this peer here, open the link that `spes ctl link` prints.";
    return;
  }
  const state = control.state, focused = document.activeElement?.textContent;
  const wasFocused = at("controls").contains(document.activeElement);
  const shown = VERBS.filter(([, , , , states]) => states.includes(state));
  const key = shown.map(([, label]) => label).join();
  if (at("controls").dataset.key !== key) {
    at("controls").dataset.key = key;
    at("controls").replaceChildren(...shown.map(([verb, label, values, warning]) => {
      const button = element("button", label);
      button.type = "button";
      button.addEventListener("click", () => { if (!warning || confirm(warning)) ask(verb, values); });
      return button;
    }));
    const buttons = [...at("controls").children];
    (buttons.find((button) => button.textContent === focused) || (wasFocused ? buttons[0] : null))?.focus();
  }
  if (!at("fields").querySelector("input")) makeFields();
  for (const [verb, name] of FIELDS) {
    const input = at(`field-${name}`);
    const value = control[verb === "set" ? "limits" : "rules"][name];
    if (input !== document.activeElement && input.getAttribute("aria-invalid") !== "true") input.value = name === "duty" && value ? `${+(100 * value).toPrecision(4)}%` : written(value);
  }
}

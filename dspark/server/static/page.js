"use strict";

// Draws what /status/stream sends. Texts are set as text, never as markup: names of requests come from outside.

const SVG = "http://www.w3.org/2000/svg";
const W = 420, H = 200, LEFT = 38, RIGHT = 10, TOP = 12, BOTTOM = 32;
const byId = (id) => document.getElementById(id);

function node(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes || {})) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function cell(text, tag) {
  const made = document.createElement(tag || "td");
  made.textContent = text;
  return made;
}

function short(value, digits) {
  return value === null || value === undefined || !isFinite(value) ? "–" : value.toFixed(digits === undefined ? 2 : digits);
}

// A plot with axes: places values of [0, xMax] x [0, yMax].
function plot(id, xMax, yMax, xName, yName, yText) {
  const svg = byId(id);
  svg.replaceChildren();
  const x = (v) => LEFT + (W - LEFT - RIGHT) * (xMax ? v / xMax : 0);
  const y = (v) => H - BOTTOM - (H - TOP - BOTTOM) * (yMax ? v / yMax : 0);
  svg.append(node("path", { class: "axis", d: `M${LEFT} ${TOP}V${H - BOTTOM}H${W - RIGHT}` }));
  for (const part of [0.5, 1]) {
    svg.append(node("path", { class: "axis", d: `M${LEFT} ${y(yMax * part)}H${W - RIGHT}`, "stroke-dasharray": "2 4" }));
    svg.append(node("text", { x: LEFT - 5, y: y(yMax * part) + 4, "text-anchor": "end" }, yText(yMax * part)));
  }
  svg.append(node("text", { x: (LEFT + W - RIGHT) / 2, y: H - 4, "text-anchor": "middle" }, xName));
  svg.append(node("text", { x: LEFT, y: TOP - 3, "text-anchor": "start" }, yName));
  return { svg, x, y };
}

function xTicks(p, most) {
  for (const v of new Set([0, Math.round(most / 2), most])) {
    p.svg.append(node("text", { x: p.x(v), y: H - BOTTOM + 13, "text-anchor": "middle" }, v));
  }
}

function empty(p, text) {
  p.svg.append(node("text", { x: W / 2, y: H / 2, "text-anchor": "middle" }, text));
}

function drawAcceptance(s) {
  const rates = s.recent.acceptance, conditional = s.recent.conditional_acceptance;
  const p = plot("acceptance", rates.length, 1, "position", "", (v) => short(v, 1));
  if (!rates.length) return empty(p, "nothing was verified lately");
  const step = p.x(1) - p.x(0);
  rates.forEach((rate, k) => {
    const bar = node("rect", {
      class: "bar", x: p.x(k) + step * 0.15, width: step * 0.7, y: p.y(rate), height: Math.max(0, p.y(0) - p.y(rate)),
    });
    bar.append(node("title", {}, `position ${k + 1}: ${short(rate)} of ${s.recent.offered[k]} offered`));
    p.svg.append(bar);
    p.svg.append(node("text", { x: p.x(k) + step / 2, y: H - BOTTOM + 13, "text-anchor": "middle" }, k + 1));
  });
  const line = conditional.map((rate, k) => `${k ? "L" : "M"}${p.x(k) + step / 2} ${p.y(rate)}`).join("");
  p.svg.append(node("path", { class: "curve", d: line }));
}

function drawBudget(s) {
  const rounds = s.rounds.filter((r) => r.requests > 0);
  const most = Math.max(1, ...rounds.map((r) => r.budget / r.requests), s.gamma || 0);
  const p = plot("budget", s.queue.slots, most, "requests", "drafts verified a request", (v) => short(v, 1));
  xTicks(p, s.queue.slots);
  if (!rounds.length) return empty(p, "no round yet");
  rounds.forEach((r, i) => {
    p.svg.append(node("circle", {
      class: i === rounds.length - 1 ? "last" : "dot", r: i === rounds.length - 1 ? 5 : 3,
      cx: p.x(r.requests), cy: p.y(r.budget / r.requests), opacity: 0.15 + 0.85 * ((i + 1) / rounds.length),
    }));
  });
}

function drawCost(s) {
  const points = s.cost.points, rounds = s.rounds.filter((r) => r.executed > 0);
  const inside = points.length ? points[points.length - 1][0] : Math.max(1, ...rounds.map((r) => r.executed));
  const shown = rounds.filter((r) => r.executed <= inside);
  const highest = Math.max(1e-6, ...points.map((q) => q[1]), ...shown.map((r) => r.forward));
  const p = plot("cost", inside, highest, "executed tokens", `ms a forward (${s.cost.state})`, (v) => short(1000 * v, v < 0.1 ? 1 : 0));
  xTicks(p, inside);
  if (points.length) {
    p.svg.append(node("path", { class: "cost", d: points.map((q, i) => `${i ? "L" : "M"}${p.x(q[0])} ${p.y(q[1])}`).join("") }));
  }
  if (!points.length && !shown.length) return empty(p, "no cost table, and no round yet");
  shown.forEach((r, i) => {
    const last = i === shown.length - 1;
    p.svg.append(node("circle", {
      class: last ? "last" : "dot", r: last ? 5 : 2.5, cx: p.x(r.executed), cy: p.y(r.forward), opacity: last ? 1 : 0.35,
    }));
  });
}

function survivalCurve(request) {
  const n = request.survival.length, w = 180, h = 36;
  const svg = node("svg", { viewBox: `0 0 ${w} ${h}`, role: "img", "aria-label": request.survival.join(", ") });
  const step = n ? w / n : w;
  request.survival.forEach((a, k) => {
    svg.append(node("rect", {
      class: k < request.verified ? "bar" : "bar skipped", x: k * step + 1, width: Math.max(1, step - 2),
      y: h - 2 - a * (h - 4), height: a * (h - 4) + 1,
    }));
  });
  if (n) svg.append(node("path", { class: "mark", d: `M${request.accepted * step} 0V${h}` }));
  return svg;
}

function drawRequests(s) {
  const rows = s.requests.map((r) => {
    const row = document.createElement("tr");
    const curve = document.createElement("td");
    curve.append(survivalCurve(r));
    row.append(cell(r.id), cell(r.mode), cell(r.prompt_tokens), cell(`${r.output_tokens} / ${r.max_tokens}`), curve,
      cell(r.verified), cell(r.accepted));
    return row;
  });
  byId("requests").replaceChildren(...rows);
  byId("idle").hidden = rows.length > 0;
}

function drawNow(s) {
  const on = Object.entries(s.guard).filter(([, holds]) => holds).map(([name]) => name);
  const decoding = s.rounds.filter((r) => r.requests > 0), last = decoding[decoding.length - 1];
  const entries = [
    ["tokens per second", short(s.tokens_per_second, 1)],
    ["running / slots", `${s.queue.running} / ${s.queue.slots}`],
    ["waiting / most", `${s.queue.waiting} / ${s.queue.max_waiting}`],
    ["accepted length", `${short(s.recent.accepted_length)} (${short(s.stats.accepted_length)} since the start)`],
    ["verify budget", `${short(s.recent.verify_budget)} of ${s.gamma} drafts a request`],
    ["block size now", last ? `${last.gamma} of ${s.gamma}${last.why ? ` (${last.why})` : ""}` : "–"],
    ["scheduler", `${s.scheduler}${s.stop_reason ? `, stopped: ${s.stop_reason}` : ""}`],
    ["guard", on.length ? on.join(", ") : "nothing is switched off"],
    ["time outside models", `${short(100 * s.stats.overhead, 1)} %`],
    ["finished", Object.entries(s.stats.finished).map(([why, n]) => `${n} ${why}`).join(", ") || "none"],
    ["faults", Object.entries(s.stats.faults).map(([where, n]) => `${n} ${where}`).join(", ") || "none"],
    ["up for", `${Math.round(s.uptime)} s`],
  ];
  byId("now").replaceChildren(...entries.flatMap(([name, value]) => {
    const dd = cell(value, "dd");
    if ((name === "guard" && on.length) || (name === "faults" && value !== "none")) dd.className = "bad";
    return [cell(name, "dt"), dd];
  }));
}

function drawNotes(s) {
  byId("notes").replaceChildren(...s.notes.map((note) => cell(note, "li")));
  byId("notes").hidden = s.notes.length === 0;
}

function draw(s) {
  byId("what").textContent = `${s.model} · drafter ${s.drafter} · version ${s.version}`;
  document.title = `dspark: ${s.model}`;
  drawNotes(s);
  drawNow(s);
  drawAcceptance(s);
  drawBudget(s);
  drawCost(s);
  drawRequests(s);
}

function state(name, text) {
  byId("connection").dataset.state = name;
  byId("connection").textContent = text;
}

// The origin alone: a page opened as http://user:key@host may not fetch addresses that carry the key.
const source = new EventSource(`${location.origin}/status/stream`);
source.onmessage = (event) => {
  draw(JSON.parse(event.data));
  state("live", "live");
};
// A browser tries again after a connection that broke, and not after an answer that is no stream (401, 503).
source.onerror = () => source.readyState === EventSource.CLOSED
  ? state("lost", "the server refuses; reload the page to try again")
  : state("lost", "connection lost, trying again");
source.addEventListener("end", () => {
  source.close();
  state("ended", "the server is shutting down");
});

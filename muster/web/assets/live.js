// Puts what the server sends into the page: whole parts by id, and cells of the grid that have changed.
"use strict";

const main = document.querySelector("main");
const link = document.getElementById("link");
let chosen = null;
let lostAt = null;

function fill(element, html) {
  const active = document.activeElement;
  const inside = active !== null && active !== element && element.contains(active);
  const label = inside ? active.getAttribute("aria-label") || active.textContent : null;
  const top = element.scrollTop;
  const made = document.createElement("template");
  made.innerHTML = html;
  element.replaceChildren(made.content);
  element.scrollTop = top;
  if (inside) {
    const again = [...element.querySelectorAll("a, button, summary")];
    again.find((each) => (each.getAttribute("aria-label") || each.textContent) === label)?.focus();
  }
}

function apply(news) {
  for (const [id, html] of Object.entries(news.parts)) {
    const element = document.getElementById(id);
    if (element !== null) fill(element, html);
  }
  for (const [id, kind, label, html] of news.cells) {
    const cell = document.getElementById(id);
    if (cell === null) continue;
    cell.className = kind;
    if (label) cell.setAttribute("aria-label", label);
    fill(cell, html);
  }
  mark();
}

function mark() {
  for (const cell of document.querySelectorAll(".chosen-cell")) cell.classList.remove("chosen-cell");
  if (chosen === null) return;
  for (const cell of document.querySelectorAll("button.cell")) {
    if (cell.dataset.node === chosen) cell.classList.add("chosen-cell");
  }
}

async function show() {
  if (chosen === null) return;
  const query = new URLSearchParams({ node: chosen });
  const answer = await fetch(`${main.dataset.worker}&${query}`).catch(() => null);
  const pane = document.getElementById("chosen");
  if (answer !== null && answer.ok && pane !== null) fill(pane, await answer.text());
}

function say(text, kind) {
  if (link.textContent !== text) link.textContent = text;
  link.className = `link ${kind}`;
}

function follow() {
  const source = new EventSource(main.dataset.events);
  source.onopen = () => {
    lostAt = null;
    say("live", "on");
  };
  source.onmessage = (event) => apply(JSON.parse(event.data));
  source.onerror = () => {
    lostAt = lostAt || new Date();
    say(`muster web is not there since ${lostAt.toTimeString().slice(0, 8)}`, "off");
    if (source.readyState === EventSource.CLOSED) setTimeout(follow, 2000);
  };
}

document.addEventListener("click", (event) => {
  const cell = event.target.closest("button.cell");
  if (cell === null) return;
  chosen = cell.dataset.node;
  mark();
  show();
});

if (main.dataset.events) {
  follow();
  setInterval(show, 2000);
}

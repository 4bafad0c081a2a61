// SPDX-License-Identifier: Apache-2.0
const TABLES = 6000; // pixels of all tables of a page that a phone shows before their buttons
const TABLE = 600; // and of one of them
const SMALLEST = 0.65; // of the size of an equation
const PAGE = 12000; // pixels of a page on a phone; a longer one shows its sections folded

// The address of a heading opens the subsection that it is in.
function unfold() {
  document.getElementById(decodeURIComponent(location.hash.slice(1)))?.closest("section")?.querySelector("details")?.setAttribute("open", "");
}

// Of a section its heading, its picture and its first paragraph stay; the rest is folded.
function foldSection(section) {
  const parts = section.matches("dl") ? [...section.querySelectorAll(":scope > dd > *")] : [...section.children];
  const isHead = (part) => /^(SPAN|H[1-6])$/.test(part.tagName) || part.querySelector(":scope > img, :scope > a > img");
  const body = parts.filter((part) => !isHead(part) && part.tagName !== "SECTION");
  const rest = body[0]?.tagName === "P" ? body.slice(1) : body;
  if (!rest.length) return;
  const details = document.createElement("details");
  details.append(Object.assign(document.createElement("summary"), { textContent: "more" }));
  rest[0].before(details);
  details.append(...rest);
}

// A page that is too long for a phone shows its subsections folded, and then its sections too.
function foldSections() {
  const article = document.querySelector(".bd-article");
  for (const level of ["section section section, section > dl.py", "section section"]) {
    if (!article || article.scrollHeight < PAGE) break;
    [...article.querySelectorAll(level)].filter((section) => !section.querySelector("details")).forEach(foldSection);
  }
  unfold();
  window.addEventListener("hashchange", unfold);
}

// On a phone a long table shows its first rows, and a button for the rest.
function fold(table, _, all) {
  const most = Math.min(TABLE, TABLES / all.length);
  const rows = [...table.querySelectorAll("tbody tr")];
  const top = table.getBoundingClientRect().top;
  const beyond = rows.filter((row, i) => i > 1 && row.getBoundingClientRect().bottom - top > most);
  if (beyond.length < 2) return;
  beyond.forEach((row) => (row.hidden = true));
  const button = document.createElement("button");
  button.className = "show-all btn btn-sm btn-outline-primary";
  button.textContent = `Show all ${rows.length} rows`;
  button.addEventListener("click", () => {
    beyond.forEach((row) => (row.hidden = false));
    button.remove();
  });
  table.after(button);
}

// On a phone a picture that is drawn for a wide page is scrolled, so that its letters can be read.
function broaden(picture) {
  if (picture.classList.contains("small-weight") || picture.naturalWidth < 520) return;
  const frame = Object.assign(document.createElement("div"), { className: "broad", tabIndex: 0 });
  picture.before(frame);
  frame.append(picture);
}

// A word of this length or more may break after its commas, dots and underscores.
function breakable(cell, length = 18) {
  const texts = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
  const long = [];
  while (texts.nextNode()) if (new RegExp(`[^\\s]{${length}}`).test(texts.currentNode.data) && !texts.currentNode.parentElement.closest("mjx-container, .math")) long.push(texts.currentNode);
  for (const text of long) {
    text.parentElement.closest("code")?.classList.add("long");
    text.replaceWith(...text.data.split(/(?<=[^\s][,_=./:](?=[^\s]))/).flatMap((part, i) => (i ? [document.createElement("wbr"), part] : [part])));
  }
}

// A typeset equation that is wider than a phone becomes smaller, as far as it can still be read.
function shrink(equation) {
  const drawn = equation.querySelector("mjx-container svg");
  if (!drawn || equation.style.fontSize) return;
  const share = equation.clientWidth / drawn.getBoundingClientRect().width;
  if (share < 1) equation.style.fontSize = `${Math.max(share * 0.99, SMALLEST) * 100}%`;
}

// The field that draws a visitor's file is a page of its own without rights: it is told the theme, and tells its height.
function joined(frame) {
  const theme = () => frame.contentWindow.postMessage(document.documentElement.dataset.theme, "*");
  new MutationObserver(theme).observe(document.documentElement, { attributeFilter: ["data-theme"] });
  window.addEventListener("message", ({ source, data }) => {
    if (source !== frame.contentWindow || !Number.isFinite(data)) return;
    frame.style.height = `${Math.min(Math.max(data, 100), 1000)}px`;
    theme();
  });
  theme();
}

window.addEventListener("load", async () => {
  document.querySelectorAll("iframe.picture").forEach(joined);
  // The theme's search button is called by what one reads on it, shortcut included.
  for (const button of document.querySelectorAll(".search-button-field")) {
    button.setAttribute("aria-label", button.innerText.replace(/\s+/g, " ").trim() || "Search");
  }
  // Each cell carries the heading of its column: for widths, and for the cards that a phone shows (site.css).
  for (const table of document.querySelectorAll(".bd-article table")) {
    const heads = [...table.querySelectorAll("thead th")].map((th) => th.textContent.trim());
    if (heads.length >= 3) table.classList.add("cards");
    if (heads.length >= 8) table.classList.add("wide");
    if (heads.length >= 12) table.classList.add("matrix");
    for (const row of table.querySelectorAll("tbody tr")) {
      [...row.cells].forEach((cell, i) => cell.setAttribute("data-label", heads[i] ?? ""));
    }
  }
  if (window.matchMedia("(max-width: 700px)").matches) {
    document.querySelectorAll(".bd-article :is(p, figure) > img").forEach(broaden);
    document.querySelectorAll(".bd-article table").forEach(fold);
    foldSections();
  }
  // A long name or setting in a table breaks after a comma or an underscore, so that its column leaves room for the others.
  for (const cell of document.querySelectorAll(".bd-article td")) breakable(cell);
  for (const link of document.querySelectorAll(".bd-sidebar-secondary a")) breakable(link, 12);
  const grown = new ResizeObserver((seen) => seen.forEach(({ target }) => shrink(target)));
  document.querySelectorAll("div.math").forEach((equation) => grown.observe(equation));
  // What is too wide for a phone is scrolled by keyboard too.
  await window.MathJax?.startup?.promise;
  for (const wide of document.querySelectorAll("mjx-container, div.math")) {
    if (wide.scrollWidth > wide.clientWidth) wide.tabIndex = 0;
  }
});

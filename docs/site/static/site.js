// SPDX-License-Identifier: Apache-2.0
window.addEventListener("load", async () => {
  // The theme's search button is called by what one reads on it, shortcut included.
  for (const button of document.querySelectorAll(".search-button-field")) {
    button.setAttribute("aria-label", button.innerText.replace(/\s+/g, " ").trim() || "Search");
  }
  // Each cell carries the heading of its column: for widths, and for the cards that a phone shows (site.css).
  for (const table of document.querySelectorAll(".bd-article table")) {
    const heads = [...table.querySelectorAll("thead th")].map((th) => th.textContent.trim());
    if (heads.length >= 4) table.classList.add("cards");
    for (const row of table.querySelectorAll("tbody tr")) {
      [...row.cells].forEach((cell, i) => cell.setAttribute("data-label", heads[i] ?? ""));
    }
  }
  // A list of settings in a table breaks after a comma or an underscore, so that its column leaves room for the others.
  for (const code of document.querySelectorAll("td code")) {
    if (code.textContent.length < 18) continue;
    code.classList.add("long");
    for (const part of code.querySelectorAll(".pre")) {
      part.replaceChildren(...part.textContent.split(/(?<=[,_=./:])/).flatMap((s) => [s, document.createElement("wbr")]));
    }
  }
  // What is too wide for a phone is scrolled by keyboard too.
  await window.MathJax?.startup?.promise;
  for (const wide of document.querySelectorAll("mjx-container, div.math")) {
    if (wide.scrollWidth > wide.clientWidth) wide.tabIndex = 0;
  }
});

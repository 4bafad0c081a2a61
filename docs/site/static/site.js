// SPDX-License-Identifier: Apache-2.0
window.addEventListener("load", async () => {
  // The theme's search button is called by what one reads on it, shortcut included.
  for (const button of document.querySelectorAll(".search-button-field")) {
    button.setAttribute("aria-label", button.innerText.replace(/\s+/g, " ").trim() || "Search");
  }
  // What is too wide for a phone is scrolled by keyboard too.
  await window.MathJax?.startup?.promise;
  for (const wide of document.querySelectorAll("mjx-container, div.math")) {
    if (wide.scrollWidth > wide.clientWidth) wide.tabIndex = 0;
  }
});

// SPDX-License-Identifier: Apache-2.0
// The page of that very name comes first. Then what explains a word comes before what uses it: the glossary, the pages on mistakes and on what a check covers, the lessons and the how-to guides.
var Scorer = {
  score: (result) => {
    const [docname, title, anchor, , score] = result;
    const asked = new URLSearchParams(location.search).get("q")?.trim().toLowerCase();
    const named = !anchor && title.toLowerCase() === asked ? 100 : 0;
    const order = [
      [/^glossary/, 60],
      [/^(sharp-bits|what-check-sees)/, 50],
      [/^course\//, 40],
      [/^(start|howto|objectives$)/, 30],
      [/^objectives\//, 20],
      [/^(frameworks\/|files\/|changelog)/, -20],
    ];
    const found = order.find(([page]) => page.test(docname));
    return score + named + (found ? found[1] : 0) - (docname.startsWith("files/") ? 20 : 0) + (anchor ? 0 : 1);
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};

// Says what is cut off, outside the window, or lies over something else.
const wrong = [];
const width = document.documentElement.clientWidth;
if (document.documentElement.scrollWidth > width + 1) {
  wrong.push(`the page is ${document.documentElement.scrollWidth} px wide in ${width} px`);
}
const name = (e) => `${e.tagName.toLowerCase()}#${e.id}.${e.className} ${e.textContent.trim().slice(0, 40)}`;
const visible = (e) => e.checkVisibility();
for (const each of document.querySelectorAll("main *, header *")) {
  if (!visible(each) || each.closest("svg") || each.closest(".skip")) continue;
  const box = each.getBoundingClientRect();
  if (box.right > width + 1 || box.left < -1) wrong.push(`outside: ${name(each)}`);
  const style = getComputedStyle(each);
  const scrolls = ["auto", "scroll"].includes(style.overflowX) || ["auto", "scroll"].includes(style.overflowY);
  if (!scrolls && style.display !== "inline" && each.scrollWidth > each.clientWidth + 1 && each.clientWidth > 0) {
    wrong.push(`cut: ${name(each)}`);
  }
}
const leaves = [...document.querySelectorAll("main *, header *")].filter((e) =>
  visible(e) && !e.closest("svg") && !e.closest(".scroll") && !e.closest(".skip") && e.children.length === 0
  && e.textContent.trim() !== "");
for (let i = 0; i < leaves.length && i < 600; i++) {
  const inline = (e) => getComputedStyle(e).display === "inline";
  for (let j = i + 1; j < leaves.length && j < i + 40; j++) {
    const least = inline(leaves[i]) || inline(leaves[j]) ? 8 : 2; // lines are higher than what is written
    const over = [...leaves[i].getClientRects()].some((a) => [...leaves[j].getClientRects()].some((b) =>
      Math.min(a.right, b.right) - Math.max(a.left, b.left) > 2
      && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > least));
    if (over) wrong.push(`overlap: ${name(leaves[i])} and ${name(leaves[j])}`);
  }
}
return wrong;

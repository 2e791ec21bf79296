"use strict";
// Comfort only: without this script everything is there but the filter and the quick tooltips.
(() => {
  const tip = document.getElementById("tip");
  const place = (x, y) => {
    const box = tip.getBoundingClientRect();
    tip.style.left = Math.max(8, Math.min(x + 14, innerWidth - box.width - 8)) + "px";
    tip.style.top = (y + 18 + box.height > innerHeight ? Math.max(8, y - box.height - 10) : y + 18) + "px";
  };
  const show = (field, x, y) => {
    tip.textContent = field.getAttribute("aria-label");
    tip.hidden = false;
    place(x, y);
  };
  const hide = () => { tip.hidden = true; };

  // The words of a field leave its title, or the browser would show them a second time.
  for (const drawing of document.querySelectorAll("svg[role=img]")) {
    const fields = [];
    for (const title of drawing.querySelectorAll("path > title")) {
      const field = title.parentNode;
      field.setAttribute("aria-label", title.textContent);
      field.setAttribute("role", "img");
      field.tabIndex = -1;
      title.remove();
      fields.push(field);
    }
    if (!fields.length) continue;
    drawing.setAttribute("role", "group");
    drawing.setAttribute("tabindex", "0");
    const boxes = new Map();
    const box = (field) => {
      if (!boxes.has(field)) boxes.set(field, field.getBBox());
      return boxes.get(field);
    };
    const centre = (field) => { const b = box(field); return [b.x + b.width / 2, b.y + b.height / 2]; };
    const nearest = (from, dx, dy) => {
      const [x, y] = centre(from);
      let best = null, least = Infinity;
      for (const field of fields) {
        if (field === from) continue;
        const [fx, fy] = centre(field);
        const along = dx * (fx - x) + dy * (fy - y), aside = Math.abs(dy * (fx - x)) + Math.abs(dx * (fy - y));
        if (along <= 0.2) continue;
        const cost = along + aside * 12;
        if (cost < least) { least = cost; best = field; }
      }
      return best;
    };
    drawing.addEventListener("pointermove", (event) => {
      const field = event.target.closest("path[aria-label]");
      if (field) show(field, event.clientX, event.clientY); else hide();
    });
    drawing.addEventListener("pointerleave", hide);
    drawing.addEventListener("focusin", (event) => {
      if (!fields.includes(event.target)) return;
      const at = event.target.getBoundingClientRect();
      show(event.target, at.left + at.width / 2, at.bottom - 6);
    });
    drawing.addEventListener("focusout", hide);
    drawing.addEventListener("keydown", (event) => {
      const way = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] }[event.key];
      const inside = fields.includes(event.target);
      let next = null;
      if (way) next = inside ? nearest(event.target, ...way) : fields[0];
      else if (event.key === "Home") next = fields[0];
      else if (event.key === "End") next = fields[fields.length - 1];
      else if (event.key === "Escape") { hide(); if (inside) drawing.focus(); return; }
      else return;
      event.preventDefault();
      if (next) next.focus();
    });
  }
  // Focus scrolls the page: the words go with their field. Those of the pointer have lost theirs.
  addEventListener("scroll", () => {
    const field = document.activeElement;
    if (tip.hidden || !field.matches("path[aria-label]")) { hide(); return; }
    const at = field.getBoundingClientRect();
    place(at.left + at.width / 2, at.bottom - 6);
  }, { passive: true, capture: true });

  const filter = document.querySelector(".filter");
  if (!filter) return;
  filter.hidden = false;
  const kind = document.getElementById("filter-kind"), words = document.getElementById("filter-text");
  const count = document.getElementById("filter-count");
  const findings = [...document.querySelectorAll(".finding")];
  const haystacks = new Map();
  const apply = () => {
    const wanted = words.value.trim().toLowerCase();
    let shown = 0;
    for (const finding of findings) {
      if (wanted && !haystacks.has(finding)) haystacks.set(finding, finding.textContent.toLowerCase());
      const fits = (!kind.value || finding.dataset.kind === kind.value) && (!wanted || haystacks.get(finding).includes(wanted));
      finding.hidden = !fits;
      shown += fits ? 1 : 0;
    }
    count.textContent = shown.toLocaleString("en") + " of " + findings.length.toLocaleString("en") + " shown";
  };
  const fold = (open) => { for (const finding of findings) if (!finding.hidden) finding.open = open; };
  kind.addEventListener("change", apply);
  words.addEventListener("input", apply);
  document.getElementById("unfold").addEventListener("click", () => fold(true));
  document.getElementById("fold").addEventListener("click", () => fold(false));
  apply();
})();

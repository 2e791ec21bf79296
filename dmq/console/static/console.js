"use strict";
// Live figures, the chart of rates, keys and the time zone. Without this script every page still works.
(() => {
  const SAMPLES_MAX = 300, SPAN_MIN = 60; // seconds
  const clock = (value) => isLocal() ? new Date(value * 1000).toLocaleTimeString("sv-SE") : new Date(value * 1000).toISOString().slice(11, 19);
  // light-dark() is resolved for properties only, not for variables.
  const probe = (name) => {
    const part = document.createElement("span");
    part.className = name;
    document.body.append(part);
    const found = getComputedStyle(part).borderTopColor;
    part.remove();
    return found;
  };

  const current = document.querySelector("nav [aria-current]"), menu = current?.closest(".menu");
  if (menu) menu.scrollLeft = current.offsetLeft - menu.offsetLeft - (menu.clientWidth - current.offsetWidth) / 2;

  // -- live figures
  const live = document.querySelector("[data-live]");
  if (live) {
    const key = "dmq-rates";
    let samples = [];
    try { samples = JSON.parse(sessionStorage.getItem(key) || "[]"); } catch { samples = []; }
    let chart = null, source = null;
    const shown = {};
    const box = document.getElementById("chart");
    const columns = () => [0, 1, 2, 3].map((place) => samples.map((sample) => sample[place]));
    const draw = () => {
      if (chart) chart.destroy();
      const styles = getComputedStyle(document.body), soft = probe("axis-colour"), grid = probe("grid-colour");
      const axis = { stroke: soft, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1 }, font: "12px " + styles.fontFamily };
      const line = (label, name) => ({ label, stroke: probe(name), width: 2, points: { show: false }, value: (_, value) => value == null ? "–" : value.toFixed(value < 10 ? 1 : 0) + "/s" });
      chart = new uPlot({
        width: box.clientWidth, height: 220, legend: { live: true }, cursor: { y: false },
        scales: { x: { time: true, range: (_, low, high) => [Math.min(low, high - SPAN_MIN), high] }, y: { range: (_, low, high) => [0, Math.max(1, high * 1.1)] } },
        axes: [{ ...axis, values: (_, splits) => splits.map(clock), space: 80, incrs: [1, 5, 10, 15, 30, 60] }, { ...axis, size: 56 }],
        series: [{ value: (_, value) => value == null ? "–" : clock(value) }, line("accepted", "r-accepted"), line("delivered", "r-delivered"), line("acknowledged", "r-acked")],
      }, columns(), box);
    };
    const add = (at, rates) => {
      const last = samples[samples.length - 1];
      if (last && at - last[0] > 5) samples.push([at - 1, null, null, null]);
      samples.push([at, rates.accepted, rates.delivered, rates.acked]);
      samples = samples.filter((sample) => at - sample[0] < SAMPLES_MAX && sample[0] <= at);
      sessionStorage.setItem(key, JSON.stringify(samples));
      document.getElementById("collecting")?.remove();
      if (chart) chart.setData(columns()); else draw();
    };
    const lost = document.getElementById("lost");
    const complain = (text) => { if (lost.textContent !== text) lost.textContent = text; lost.hidden = !text; };
    const open = () => {
      source = new EventSource(live.dataset.live);
      source.onmessage = (event) => {
        const found = JSON.parse(event.data);
        complain(found.error || "");
        for (const [id, html] of Object.entries(found.parts || {})) {
          const part = document.getElementById(id);
          const picked = getSelection();
          const isUsed = part.contains(document.activeElement) || (!picked.isCollapsed && part.contains(picked.anchorNode));
          if (shown[id] === html || isUsed || part.querySelector("details[open]")) continue;
          part.innerHTML = shown[id] = html;
          localise(part);
        }
        if (found.rates) add(found.at_ms / 1000, found.rates);
      };
      source.onerror = () => complain("The console does not answer. This page reconnects by itself.");
    };
    const close = () => { source?.close(); source = null; };
    document.addEventListener("visibilitychange", () => { if (document.hidden) close(); else if (!source) open(); });
    addEventListener("pagehide", close);
    addEventListener("pageshow", () => { if (!source && !document.hidden) open(); });
    addEventListener("resize", () => chart?.setSize({ width: box.clientWidth, height: 220 }));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { if (chart) draw(); });
    if (box && samples.length > 1 && Date.now() / 1000 - samples[samples.length - 1][0] < SAMPLES_MAX) {
      document.getElementById("collecting")?.remove();
      draw();
    }
    if (!document.hidden) open();
  }

  // -- times in UTC or local
  const zone = document.getElementById("zone");
  const isLocal = () => localStorage.getItem("dmq-zone") === "local";
  function localise(part) {
    for (const each of part.querySelectorAll("time[datetime]")) {
      const at = new Date(each.dateTime);
      const text = isLocal() ? at.toLocaleString("sv-SE", { timeZoneName: "shortOffset", fractionalSecondDigits: 3 }) : each.dateTime;
      if ("exact" in each.dataset) each.textContent = text; else each.title = text;
    }
  }
  const showZone = () => {
    zone.textContent = isLocal() ? "Times local" : "Times in UTC";
    localise(document);
  };
  zone.hidden = false;
  zone.addEventListener("click", () => { localStorage.setItem("dmq-zone", isLocal() ? "utc" : "local"); showZone(); });
  showZone();
  document.addEventListener("htmx:after:swap", () => localise(document));

  // -- all rows of a page
  const all = document.querySelector("[data-all]");
  if (all) {
    all.hidden = false;
    all.addEventListener("change", () => { for (const each of document.getElementsByName(all.dataset.all)) each.checked = all.checked; });
  }

  // -- the command
  for (const button of document.querySelectorAll("[data-copy]")) {
    button.hidden = !navigator.clipboard;
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(button.parentNode.querySelector("code").textContent);
      button.textContent = "Copied";
    });
  }

  // -- keys
  const help = document.getElementById("help"), keys = document.getElementById("keys");
  keys.hidden = false;
  keys.addEventListener("click", () => help.showModal());
  const move = (step) => {
    const links = [...document.querySelectorAll(".rows tbody a")].filter((link) => link.closest("tr").querySelector("a") === link);
    const row = document.activeElement.closest?.("tr");
    const at = links.findIndex((link) => link.closest("tr") === row);
    links[Math.max(0, Math.min(links.length - 1, at < 0 ? 0 : at + step))]?.focus();
  };
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || help.open) return;
    if (event.target.closest("input, select, textarea")) return;
    if (event.key === "/") document.querySelector("main input:not([type=hidden]), main select")?.focus();
    else if (event.key === "j") move(1);
    else if (event.key === "k") move(-1);
    else if (event.key === "?") help.showModal();
    else if (/^[1-9]$/.test(event.key)) document.querySelectorAll("nav li a")[event.key - 1]?.click();
    else return;
    event.preventDefault();
  });
})();

"use strict";
// Hover: the nearest point of a chart with its values, and the same arm in every chart of its section.
(() => {
  const near = 40; // in units of the drawing: farther away, nothing is meant
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  document.body.append(tip);

  const emphasise = (section, arm) => {
    for (const part of section.querySelectorAll("[data-arm]")) {
      part.classList.toggle("dim", arm !== null && part.dataset.arm !== arm);
    }
  };

  const nearest = (series, x, y, frame) => {
    let best = null;
    for (const one of series) {
      for (const point of one.points) {
        if (point[1] < 0 || point[1] > frame.height) continue;
        const distance = Math.hypot(point[0] - x, point[1] - y);
        if (distance < near && (best === null || distance < best.distance)) best = { distance, point, arm: one.arm };
      }
    }
    return best;
  };

  const show = (found, event) => {
    tip.replaceChildren();
    const name = document.createElement("strong");
    name.textContent = found.arm;
    const values = document.createElement("span");
    values.textContent = found.point[2];
    tip.append(name, values);
    tip.hidden = false;
    const room = document.documentElement.clientWidth - tip.offsetWidth - 8;
    tip.style.left = `${Math.max(8, Math.min(event.clientX + 14, room))}px`;
    tip.style.top = `${Math.max(8, event.clientY - tip.offsetHeight - 14)}px`;
  };

  for (const chart of document.querySelectorAll("svg.chart")) {
    const section = chart.closest("section");
    const frame = chart.viewBox.baseVal;
    const series = [...chart.querySelectorAll("g.series")].map((one) => ({
      arm: one.dataset.arm,
      points: JSON.parse(one.dataset.points),
    }));
    const cursor = document.createElementNS(chart.namespaceURI, "circle");
    cursor.setAttribute("class", "cursor");
    cursor.setAttribute("r", "5");
    cursor.setAttribute("visibility", "hidden");
    chart.append(cursor);
    const leave = () => {
      tip.hidden = true;
      cursor.setAttribute("visibility", "hidden");
      emphasise(section, null);
    };
    const move = (event) => {
      const box = chart.getBoundingClientRect();
      const scale = frame.width / box.width;
      const found = nearest(series, (event.clientX - box.left) * scale, (event.clientY - box.top) * scale, frame);
      if (found === null) return leave();
      cursor.setAttribute("cx", found.point[0]);
      cursor.setAttribute("cy", found.point[1]);
      cursor.setAttribute("visibility", "visible");
      show(found, event);
      emphasise(section, found.arm);
    };
    chart.addEventListener("pointermove", move);
    chart.addEventListener("pointerdown", move);
    chart.addEventListener("pointerleave", leave);
  }

  for (const entry of document.querySelectorAll(".legend [data-arm]")) {
    const section = entry.closest("section");
    entry.addEventListener("pointerenter", () => emphasise(section, entry.dataset.arm));
    entry.addEventListener("pointerleave", () => emphasise(section, null));
  }
})();

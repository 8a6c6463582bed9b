"use strict";
// Shows the values of the column under the pointer.
const bytes = n => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
  let unit = 0;
  while (n >= 1024) { n /= 1024; unit += 1; }
  return (unit ? n.toFixed(2) : n) + " " + units[unit];
};
const time = us => us >= 1e6 ? (us / 1e6).toFixed(3) + " s" : us >= 1e3 ? (us / 1e3).toFixed(2) + " ms" : us.toFixed(0) + " µs";
for (const plot of document.querySelectorAll(".plot")) {
  const numbers = key => plot.dataset[key].split(" ").map(Number);
  const live = numbers("live"), reserved = numbers("reserved");
  const from = Number(plot.dataset.from), to = Number(plot.dataset.to);
  const text = plot.parentElement.querySelector("output");
  const cross = document.createElement("i");
  cross.className = "cross";
  cross.hidden = true;
  plot.append(cross);
  plot.addEventListener("pointermove", event => {
    const box = plot.getBoundingClientRect();
    const part = Math.min(0.999999, Math.max(0, (event.clientX - box.left) / box.width));
    const at = Math.floor(part * live.length);
    cross.hidden = false;
    cross.style.left = part * 100 + "%";
    text.textContent = time(from + part * (to - from)) + ": live " + bytes(live[at]) + ", reserved " + bytes(reserved[at]);
  });
  plot.addEventListener("pointerleave", () => { cross.hidden = true; text.textContent = ""; });
}

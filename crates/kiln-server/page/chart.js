// The loss curve of a training, as SVG.

const SPACE = "http://www.w3.org/2000/svg";
/** Height of the drawing, and the margins of its axes, in pixels. */
const [HEIGHT, LEFT, RIGHT, TOP, BOTTOM] = [220, 52, 10, 10, 26];
/** The most points that are drawn. */
const MOST = 600;

function element(name, attributes, text) {
  const made = document.createElementNS(SPACE, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

/** About `count` round numbers between two others. */
export function ticks(from, to, count) {
  const rough = (to - from) / count;
  if (!(rough > 0)) return [from];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
  const first = Math.ceil(from / step);
  return Array.from({ length: Math.floor(to / step + 1e-9) - first + 1 }, (_, i) => (first + i) * step);
}

/** The largest number but for the highest twentieth: single steps may be far off. */
function highest(values) {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.floor((sorted.length - 1) * 0.95)];
}

/** Draws points `[step, loss, smoothed loss]` of a training with so many steps into an SVG element. */
export function draw(svg, points, steps) {
  const every = Math.ceil(points.length / MOST);
  const shown = points.filter((_, i) => i % every === 0 || i === points.length - 1);
  const width = Math.max(240, svg.clientWidth);
  svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  if (!shown.length) {
    svg.replaceChildren(element("text", { x: width / 2, y: HEIGHT / 2, "text-anchor": "middle" }, "The curve begins with the first step."));
    svg.setAttribute("aria-label", "No losses yet");
    return;
  }
  const last = shown[shown.length - 1];
  // A young curve is not squeezed to the left.
  const end = Math.max(last[0], Math.min(steps, Math.max(20, 4 * last[0])));
  const smoothed = shown.map((point) => point[2]);
  let [low, high] = [Math.min(...smoothed, ...shown.map((point) => point[1])), Math.max(highest(shown.map((point) => point[1])), ...smoothed)];
  if (!(high > low)) [low, high] = [low * 0.9, high * 1.1 || 1];
  const x = (step) => LEFT + ((width - LEFT - RIGHT) * step) / Math.max(1, end);
  const y = (loss) => HEIGHT - BOTTOM - ((HEIGHT - TOP - BOTTOM) * (Math.min(loss, high) - low)) / (high - low);
  const line = (index) => shown.map((point) => `${x(point[0]).toFixed(1)},${y(point[index]).toFixed(1)}`).join(" ");
  const digits = high < 0.01 ? 4 : high < 1 ? 3 : 2;
  const rows = ticks(low, high, 4).flatMap((loss) => [
    element("line", { class: "grid-line", x1: LEFT, x2: width - RIGHT, y1: y(loss), y2: y(loss) }),
    element("text", { x: LEFT - 6, y: y(loss) + 4, "text-anchor": "end" }, loss.toFixed(digits)),
  ]);
  const columns = ticks(0, end, 6).filter(Number.isInteger).map((step) =>
    element("text", { x: x(step), y: HEIGHT - 8, "text-anchor": x(step) > width - 30 ? "end" : "middle" }, step));
  svg.replaceChildren(...rows, ...columns,
    element("polyline", { class: "raw", points: line(1) }),
    element("polyline", { class: "smooth", points: line(2) }),
    element("circle", { class: "smooth-end", cx: x(last[0]), cy: y(last[2]), r: 4 }));
  svg.setAttribute("aria-label", `Loss by step: ${shown[0][2].toFixed(4)} at step ${shown[0][0]}, ${last[2].toFixed(4)} at step ${last[0]}`);
}

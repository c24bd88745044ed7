// Pictures on canvases: a line over time, and the KV cache as a grid of blocks. Colours come from the style sheet.

const probe = document.createElement("i");
probe.hidden = true;
document.body.append(probe);

/** A variable of the style sheet as a colour that a canvas knows. */
function colour(name) {
  probe.style.color = `var(${name})`;
  return getComputedStyle(probe).color;
}

/** The canvas' context in CSS pixels, sharp on any screen, and wiped. */
function begin(canvas) {
  const { width, height } = canvas.getBoundingClientRect();
  const scale = window.devicePixelRatio || 1;
  const [w, h] = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== w || canvas.height !== h) [canvas.width, canvas.height] = [w, h];
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

/** A round number at or above `value`, for the top of an axis. */
export function ceiling(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 5, 7.5, 10].map((m) => m * power).find((m) => m >= value * 0.9999);
}

/**
 * A line over time. `points` are [age in seconds, value or null], newest last; gaps in the values are gaps in the line.
 * `label` writes a value on the axis; `marks` are ages at which to draw an upright line; `at` is the age to point out.
 */
export function drawLine(canvas, points, span, { fill = false, label = null, name = "--red", marks = [], at = null } = {}) {
  const { context, width, height } = begin(canvas);
  const values = points.map((p) => p[1]).filter((v) => v !== null);
  const top = ceiling(Math.max(0, ...values));
  const x = (age) => width - (age / span) * width;
  const y = (value) => height - 1.5 - (value / top) * (height - (label ? 17 : 4));
  const upright = (age, dash, tint) => {
    context.strokeStyle = colour(tint);
    context.setLineDash(dash);
    context.beginPath();
    context.moveTo(Math.round(x(age)) + 0.5, 0);
    context.lineTo(Math.round(x(age)) + 0.5, height);
    context.stroke();
    context.setLineDash([]);
  };
  const level = (value, dash) => {
    context.beginPath();
    context.setLineDash(dash);
    context.moveTo(0, Math.round(y(value)) + 0.5);
    context.lineTo(width, Math.round(y(value)) + 0.5);
    context.stroke();
    context.setLineDash([]);
  };
  context.strokeStyle = colour("--line");
  context.lineWidth = 1;
  level(0, []);
  if (label && values.length) {
    level(top, [2, 4]);
    level(top / 2, [2, 4]);
  }
  for (const age of marks) upright(age, [3, 3], "--red");
  context.lineJoin = "round";
  for (const run of runs(points)) {
    context.beginPath();
    run.forEach(([age, value], i) => (i ? context.lineTo(x(age), y(value)) : context.moveTo(x(age), y(value))));
    context.strokeStyle = colour(name);
    context.lineWidth = 1.75;
    context.stroke();
    if (run.length === 1) {
      context.fillStyle = colour(name);
      context.fillRect(x(run[0][0]) - 1.5, y(run[0][1]) - 1.5, 3, 3);
    }
    if (fill) {
      context.lineTo(x(run.at(-1)[0]), height);
      context.lineTo(x(run[0][0]), height);
      context.globalAlpha = 0.13;
      context.fillStyle = colour(name);
      context.fill();
      context.globalAlpha = 1;
    }
  }
  if (at !== null) upright(at, [], "--dim");
  if (label && values.length) {
    context.font = `11px ${getComputedStyle(document.body).fontFamily}`;
    context.fillStyle = colour("--dim");
    context.textBaseline = "bottom";
    context.fillText(label(top), 0, y(top) - 1);
    if (height > 60 && label(top / 2) !== label(top)) context.fillText(label(top / 2), 0, y(top / 2) - 1);
  }
}

function* runs(points) {
  let run = [];
  for (const point of points) {
    if (point[1] === null) {
      if (run.length) yield run;
      run = [];
    } else run.push(point);
  }
  if (run.length) yield run;
}

/** Cells of a grid that fills `width` by `height`: about `most` of them and never fewer than 1, and their size. */
export function grid(width, height, most) {
  const size = Math.max(5, Math.sqrt((width * height) / Math.max(1, most)));
  const columns = Math.max(1, Math.floor(width / size));
  const rows = Math.max(1, Math.floor(height / (width / columns)));
  return { columns, size: width / columns, cells: Math.min(most, columns * rows) };
}

/** Cells of each kind, in order: every kind that has blocks gets at least one cell where there is room. */
export function share(counts, total, cells) {
  const exact = counts.map((count) => (total ? (count / total) * cells : 0));
  const given = exact.map((value, i) => (counts[i] ? Math.max(1, Math.round(value)) : 0));
  let over = given.reduce((a, b) => a + b, 0) - cells;
  while (over > 0) {
    const most = given.indexOf(Math.max(...given));
    given[most] -= 1;
    over -= 1;
  }
  while (over < 0) {
    const i = exact.map((value, k) => (counts[k] ? value - given[k] : -Infinity));
    given[i.indexOf(Math.max(...i))] += 1;
    over += 1;
  }
  return given;
}

/** The KV cache: `kinds` are [colour name, blocks]. Returns how many blocks one cell stands for. */
export function drawBlocks(canvas, kinds) {
  const { context, width, height } = begin(canvas);
  const total = kinds.reduce((sum, [, count]) => sum + count, 0);
  if (!total || width < 10) return 0;
  const gap = 2;
  const { columns, size, cells } = grid(width + gap, height + gap, Math.min(total, 800));
  const given = share(kinds.map((k) => k[1]), total, cells);
  let cell = 0;
  kinds.forEach(([name], kind) => {
    context.fillStyle = colour(name);
    for (let i = 0; i < given[kind]; i += 1, cell += 1) {
      const [x, y] = [(cell % columns) * size, Math.floor(cell / columns) * size];
      context.beginPath();
      context.roundRect(x, y, size - gap, size - gap, Math.min(2.5, size / 5));
      context.fill();
    }
  });
  return total / cells;
}

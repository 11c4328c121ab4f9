"use strict";
// Epsilon from the definition, for pages that check a certificate. It shares no code and no method with the accountant
// in accounting/epsilon: there losses are put on a lattice, here their transform is integrated.
//
// One step with the record gives the output P = (1-q) N(0, s^2) + q N(1, s^2), without it Q = N(0, s^2), in units of the
// clipping norm. With L = log dP/dQ under P, and K(z) the sum over all steps of log E exp(z L), the smallest delta at
// epsilon is the mean of max(0, 1 - exp(epsilon - L)) over the sum of all losses, which by inversion of the Laplace
// transform is, for any c > 0,
//
//     delta(epsilon) = 1/(2 pi) * integral over t of exp(K(z) - z epsilon) / (z (z+1)),  z = c + it.
//
// Both the means inside K and this integral are sums by the trapezoidal rule, whose error for such functions falls
// exponentially: with a period W it adds delta(epsilon + mW) exp(cmW) for every m but 0, which is bounded below 1e-9 of
// delta. Where the integrand falls too slowly (few steps, or rare draws), losses are convolved on a lattice instead,
// once rounded up and once down. So each answer is an interval [low, high], but for what the sums inside a cell of that
// lattice leave out: below 1e-5 of it, by the bounds that accounting/epsilon proves (tests/accounting/test_acc_browser.py).

const NEGLIGIBLE = 1e-10; // share of delta up to which sums are cut
const MOST_WORK = 2e7; // points of both integrals together, beyond which the lattice takes over
const MOST_TILT = 1024; // of c
const MOST_NODES = 5e5; // of a step's output, on that lattice
const CELLS = 2 ** 18; // of that lattice

// ---- One kind of step as points: the loss there, and the logarithm of its weight under P (forward) or Q (backward).

function normalLog(x, mean, sigma) {
  return -((x - mean) ** 2) / (2 * sigma * sigma) - Math.log(sigma) - 0.9189385332046727;
}

function logDensity(mixture, x, sigma) {
  let most = -Infinity, sum = 0;
  for (const [log, mean] of mixture) most = Math.max(most, log - (x - mean) ** 2 / (2 * sigma * sigma));
  for (const [log, mean] of mixture) sum += Math.exp(log - (x - mean) ** 2 / (2 * sigma * sigma) - most);
  return most + Math.log(sum) + normalLog(0, 0, sigma);
}

// The two outputs as mixtures of N(mean, sigma^2): lists of [log weight, mean].
function mixtures(event, neighbours) {
  const q = event.rate, out = Math.log1p(-q), into = Math.log(q);
  if (neighbours === "replacement") return [[[out, 0], [into, 1]], [[out, 0], [into, -1]]];
  const size = neighbours.group ?? 1, drawn = [];
  for (let j = 0, ways = 0; j <= size; j++) {
    drawn.push([ways + (j ? j * into : 0) + (j < size ? (size - j) * out : 0), j]);
    ways += Math.log(size - j) - Math.log(j + 1);
  }
  return [drawn.filter(([log]) => log > -Infinity), [[0, 0]]];
}

function points(event, neighbours, backward, tilt, frequency, finer) {
  const s2 = event.sigma ** 2, [p, q] = mixtures(event, neighbours);
  const means = [...p, ...q].map(([, mean]) => mean), reach = Math.max(...means) - Math.min(...means) || 1;
  // The integrand is analytic up to a distance a from the line, and grows there by no more than this exponent says.
  const a = Math.min(Math.PI * s2 / (2 * reach), 7 * event.sigma) / (reach > 1 ? 2 : 1);
  const step = 2 * Math.PI * a / (45 + a * a / (2 * s2) + (frequency * reach * a) / s2 + 0.35 * tilt * reach) / finer;
  const left = Math.min(...means) - 13 * event.sigma - (backward ? tilt * reach : 0);
  const right = Math.max(...means) + 13 * event.sigma + tilt * reach;
  const count = Math.ceil((right - left) / step) + 1;
  const loss = new Float64Array(count), weight = new Float64Array(count);
  const single = neighbours === "record" && event.rate < 1;
  for (let k = 0; k < count; k++) {
    const x = left + k * step;
    if (single) { // the same as below, without the cancellation of two logarithms that are nearly equal
      const u = (2 * x - 1) / (2 * s2);
      const l = u < 30 ? Math.log1p(event.rate * Math.expm1(u))
        : u + Math.log(event.rate) + Math.log1p(((1 - event.rate) / event.rate) * Math.exp(-u));
      loss[k] = backward ? -l : l;
      weight[k] = Math.log(step) + normalLog(x, 0, event.sigma) + (backward ? 0 : l);
    } else {
      const above = logDensity(p, x, event.sigma), below = logDensity(q, x, event.sigma);
      loss[k] = backward ? below - above : above - below;
      weight[k] = Math.log(step) + (backward ? below : above);
    }
  }
  return { loss, weight, count: event.count };
}

// ---- K and its derivatives.

function tilted(part, c) { // weights of exp(c L), normalised, and the logarithm of their sum
  const n = part.loss.length, found = new Float64Array(n);
  let most = -Infinity;
  for (let k = 0; k < n; k++) most = Math.max(most, (found[k] = part.weight[k] + c * part.loss[k]));
  let sum = 0;
  for (let k = 0; k < n; k++) sum += found[k] = Math.exp(found[k] - most);
  for (let k = 0; k < n; k++) found[k] /= sum;
  return { at: found, log: most + Math.log(sum) };
}

function moments(parts, c) {
  let value = 0, mean = 0, variance = 0;
  for (const part of parts) {
    const { at, log } = tilted(part, c);
    let first = 0, second = 0;
    for (let k = 0; k < at.length; k++) first += at[k] * part.loss[k];
    for (let k = 0; k < at.length; k++) second += at[k] * (part.loss[k] - first) ** 2;
    value += part.count * log; mean += part.count * first; variance += part.count * second;
  }
  return { value, mean, variance };
}

// ---- delta(epsilon) of one direction.

class Transform {
  // `make(tilt, frequency)`: the parts, exact up to that tilt and frequency. `reach`: how far apart two means may lie.
  constructor(make, reach) { this.make = make; this.tilt = 1; this.parts = make(1, 8); this.most = MOST_TILT / reach ** 2; }

  at(c) {
    while (2 * c > this.tilt && this.tilt < this.most) this.parts = this.make((this.tilt *= 4), 8);
    return moments(this.parts, c);
  }

  // Where exp(K(z) - z epsilon) / (z(z+1)) has its saddle, for the epsilon or the delta that is asked for.
  saddle({ epsilon, delta }) {
    let low = Math.log(1e-4), high = Math.log(1e-4);
    const beyond = (logC) => {
      const c = Math.exp(logC), k = this.at(c), there = k.mean - 1 / c - 1 / (c + 1);
      if (epsilon !== undefined) return there > epsilon;
      const width = k.variance + 1 / c ** 2 + 1 / (c + 1) ** 2;
      return k.value - c * there - Math.log(c * (c + 1)) - 0.5 * Math.log(2 * Math.PI * width) < Math.log(delta);
    };
    while (!beyond(high)) { if (2 * Math.exp(high) > this.most) return null; low = high; high += 1; }
    for (let i = 0; i < 30; i++) { const middle = (low + high) / 2; if (beyond(middle)) high = middle; else low = middle; }
    return Math.exp(high);
  }

  // A function of epsilon, good near the point that is asked for; null where the integrand falls too slowly.
  near(asked) {
    const c = this.saddle(asked);
    if (c === null) return null;
    const k = this.at(c), there = asked.epsilon ?? k.mean - 1 / c - 1 / (c + 1);
    const size = k.value - c * there - Math.log(c * (c + 1)) - 0.5 * Math.log(2 * Math.PI * (k.variance + 1 / c ** 2));
    const small = size + Math.log(NEGLIGIBLE);
    let period = -small / c;
    const wrapped = () => Math.min(...[1.25, 1.5, 2].map((f) => {
      const more = this.at(f * c).value;
      return c * period + more - f * c * (there + period);
    }));
    while (wrapped() > small) period *= 1.5;
    const dt = (2 * Math.PI) / period, heads = [], angles = [], floor = NEGLIGIBLE * 0.01;
    let frequency = 64 * dt, parts = this.make(this.tilt, frequency), weights = parts.map((part) => tilted(part, c));
    for (let j = 0, quiet = 0, work = 0; quiet < 12; j++) {
      const t = j * dt;
      work += parts.reduce((sum, part) => sum + part.loss.length, 0);
      if (work > MOST_WORK) return null;
      if (t > frequency) {
        frequency *= 4;
        parts = this.make(this.tilt, frequency);
        weights = parts.map((part) => tilted(part, c));
      }
      let head = 0, angle = 0;
      for (let i = 0; i < parts.length; i++) {
        let re = 0, im = 0;
        const { loss, count } = parts[i], { at } = weights[i];
        for (let n = 0; n < loss.length; n++) {
          if (at[n] < 1e-22) continue;
          re += at[n] * Math.cos(t * loss[n]); im += at[n] * Math.sin(t * loss[n]);
        }
        head += 0.5 * count * Math.log(re * re + im * im); angle += count * Math.atan2(im, re);
      }
      // divided by z(z+1)
      head -= 0.5 * Math.log((c * c + t * t) * ((c + 1) ** 2 + t * t));
      angle -= Math.atan2(t, c) + Math.atan2(t, c + 1);
      heads.push(head); angles.push(angle);
      quiet = head + Math.log(1 + t / dt) < heads[0] + Math.log(floor) ? quiet + 1 : 0;
    }
    return (epsilon) => {
      let sum = 0;
      for (let j = 0; j < heads.length; j++) {
        sum += (j ? 1 : 0.5) * Math.exp(heads[j] - heads[0]) * Math.cos(angles[j] - j * dt * epsilon);
      }
      return (sum * dt / Math.PI) * Math.exp(heads[0] + k.value - c * epsilon);
    };
  }
}

// ---- The lattice: where the integrand above falls too slowly, and for random allocation.

function fft(re, im, inverse) {
  const n = re.length;
  for (let i = 1, j = 0; i < n; i++) {
    let bit = n >> 1;
    for (; j & bit; bit >>= 1) j ^= bit;
    j ^= bit;
    if (i < j) { [re[i], re[j]] = [re[j], re[i]]; [im[i], im[j]] = [im[j], im[i]]; }
  }
  for (let size = 2; size <= n; size *= 2) {
    const half = size / 2, angle = ((inverse ? 2 : -2) * Math.PI) / size;
    const cos = new Float64Array(half), sin = new Float64Array(half);
    for (let k = 0; k < half; k++) { cos[k] = Math.cos(angle * k); sin[k] = Math.sin(angle * k); }
    for (let start = 0; start < n; start += size) {
      for (let k = 0; k < half; k++) {
        const i = start + k, j = i + half;
        const x = re[j] * cos[k] - im[j] * sin[k], y = re[j] * sin[k] + im[j] * cos[k];
        re[j] = re[i] - x; im[j] = im[i] - y; re[i] += x; im[i] += y;
      }
    }
  }
}

// The masses of one kind of step on a lattice of width h, around which they are wrapped, and the loss where it begins.
// Rounded up, a loss is divided between the two points beside it so that both outputs keep their measure, which only
// makes them easier to tell apart. Rounded down, all outputs whose losses lie in one cell become one output, which only
// makes them harder; its loss is that of their masses, and moves to the point below unless it is the heaviest, where
// the lattice begins. Losses are in order.
function onLattice({ loss, weight }, h, up) {
  const masses = new Float64Array(CELLS), add = (place, mass) => { masses[((place % CELLS) + CELLS) % CELLS] += mass; };
  const first = Math.min(loss[0], loss[loss.length - 1]);
  if (up) {
    for (let k = 0; k < loss.length; k++) {
      const place = (loss[k] - first) / h, cell = Math.floor(place), mass = Math.exp(weight[k]);
      const above = (mass * Math.expm1(-(place - cell) * h)) / Math.expm1(-h);
      add(cell, mass - above); add(cell + 1, above);
    }
    return { origin: first, masses };
  }
  const cells = []; // [mass, mass of the other output]
  for (let k = 0, before = NaN; k < loss.length; k++) {
    const cell = Math.floor((loss[k] - first) / h), mass = Math.exp(weight[k]);
    if (cell !== before) cells.push([0, 0]);
    before = cell;
    cells[cells.length - 1][0] += mass;
    cells[cells.length - 1][1] += Math.exp(weight[k] - loss[k]);
  }
  const [mass, other] = cells.reduce((most, each) => (each[0] > most[0] ? each : most)), origin = Math.log(mass / other);
  for (const each of cells) if (each[0] > 0) add(each[0] === mass ? 0 : Math.floor((Math.log(each[0] / each[1]) - origin) / h), each[0]);
  return { origin, masses };
}

// delta of the sum of all losses, which lies between `least` and `least` + h CELLS but for a negligible part.
function convolved(parts, least, h, up) {
  const re = new Float64Array(CELLS).fill(1), im = new Float64Array(CELLS);
  let start = 0;
  for (const part of parts) {
    const { origin, masses: x } = onLattice(part, h, up), y = new Float64Array(CELLS);
    fft(x, y, false);
    for (let k = 0; k < CELLS; k++) {
      const size = Math.hypot(x[k], y[k]) ** part.count, angle = Math.atan2(y[k], x[k]) * part.count;
      const a = size * Math.cos(angle), b = size * Math.sin(angle), r = re[k];
      re[k] = r * a - im[k] * b; im[k] = r * b + im[k] * a;
    }
    start += part.count * origin;
  }
  fft(re, im, true);
  const shift = Math.floor((least - start) / h);
  return (epsilon) => {
    let delta = 0;
    for (let k = CELLS - 1; k >= 0; k--) {
      const at = start + (shift + k) * h;
      if (at <= epsilon) break;
      delta -= (re[(((shift + k) % CELLS) + CELLS) % CELLS] / CELLS) * Math.expm1(epsilon - at);
    }
    return delta;
  };
}

// Bounds of the sum of all losses, by Chernoff: each is passed with a probability of `small` at most.
function range(parts, small) {
  const bounds = [Infinity, -Infinity];
  for (let c = 1 / 1024; c < 1e5; c *= 1.2) bounds[0] = Math.min(bounds[0], (moments(parts, c).value - Math.log(small)) / c);
  for (let c = 1 / 1024; c < 1e5; c *= 1.2) bounds[1] = Math.max(bounds[1], (Math.log(small) - moments(parts, -c).value) / c);
  return { most: bounds[0], least: bounds[1] };
}

// ---- Random allocation: the mean R of `slots` ratios exp(u), u ~ N(-1/(2 s^2), 1/s^2), one for each step of an epoch.

// On a lattice of logarithms: the mass of each point under Q, and its mean of R times that, the mass under P.
function combine(a, b, h, up) {
  const share = a.steps / (a.steps + b.steps), steps = a.steps + b.steps;
  const first = Math.min(a.first, b.first) - 1;
  const size = Math.max(a.first + a.mass.length, b.first + b.mass.length) - first + 2;
  const mass = new Float64Array(size), moment = new Float64Array(size);
  for (let d = b.first - a.first - a.mass.length + 1; d < b.first - a.first + b.mass.length; d++) { // j - i of a pair
    const moved = Math.log(share + (1 - share) * Math.exp(Math.min(d * h, 600))) / h + (d * h > 600 ? d - 600 / h : 0);
    const cell = up ? Math.floor(moved) : Math.round(moved), part = up ? Math.expm1((moved - cell) * h) / Math.expm1(h) : 0;
    const from = Math.max(0, b.first - a.first - d), to = Math.min(a.mass.length, b.first - a.first - d + b.mass.length);
    for (let i = from; i < to; i++) {
      const j = i + a.first + d - b.first, both = a.mass[i] * b.mass[j], at = i + a.first + cell - first;
      mass[at] += both * (1 - part);
      if (up) mass[at + 1] += both * part;
      else moment[at] += share * a.moment[i] * b.mass[j] + (1 - share) * a.mass[i] * b.moment[j];
    }
  }
  if (up) for (let k = 0; k < size; k++) moment[k] = mass[k] * Math.exp((first + k) * h);
  let begin = 0, end = size;
  while (begin < end && mass[begin] < 1e-30 && moment[begin] < 1e-30) begin++;
  while (end > begin && mass[end - 1] < 1e-30 && moment[end - 1] < 1e-30) end--;
  return { steps, first: first + begin, mass: mass.slice(begin, end), moment: moment.slice(begin, end) };
}

function allocated({ slots, sigma, count }, backward, up) {
  const reach = 12 / sigma + 1 / (2 * sigma * sigma), h = (2 * reach) / 4000;
  const first = Math.floor(-reach / h), single = { steps: 1, first, mass: new Float64Array(4001), moment: new Float64Array(4001) };
  for (let k = 0; k <= 4000; k++) {
    const u = (first + k) * h;
    single.mass[k] = h * Math.exp(normalLog(u, -1 / (2 * sigma * sigma), 1 / sigma));
    single.moment[k] = h * Math.exp(normalLog(u, 1 / (2 * sigma * sigma), 1 / sigma));
  }
  const mean = (steps) => {
    if (steps === 1) return single;
    const half = mean(Math.floor(steps / 2)), even = combine(half, half, h, up);
    return steps % 2 ? combine(even, single, h, up) : even;
  };
  const found = mean(slots), loss = [], weight = [];
  for (let k = 0; k < found.mass.length; k++) {
    if (!(found.mass[k] > 0 && found.moment[k] > 0)) continue;
    const l = Math.log(found.moment[k] / found.mass[k]);
    loss.push(backward ? -l : l);
    weight.push(Math.log(backward ? found.mass[k] : found.moment[k]));
  }
  return { loss: Float64Array.from(loss), weight: Float64Array.from(weight), count };
}

// ---- What is asked.

// delta of one direction from the lattice, rounded down and up: two functions of any epsilon.
function fromLattice(events, neighbours, backward, small) {
  const kind = (event, up, finer) => (event.slots ?? 1) > 1
    ? allocated(event, backward, up) : points(event, neighbours, backward, 8, 64, finer);
  const { least, most } = range(events.map((event) => kind(event, true, 1)), small), room = (most - least) / 16;
  const h = (most - least + 2 * room) / CELLS;
  const parts = (up) => events.map((event) => {
    const some = kind(event, up, 1);
    if ((event.slots ?? 1) > 1) return some;
    let widest = 0; // losses of neighbouring points then differ by half a cell at most
    for (let k = 1; k < some.loss.length; k++) widest = Math.max(widest, Math.abs(some.loss[k] - some.loss[k - 1]));
    return kind(event, up, Math.min(Math.max(1, (2 * widest) / h), MOST_NODES / some.loss.length));
  });
  return [false, true].map((up) => convolved(parts(up), least - room, h, up));
}

// The same, good near an epsilon or delta: by the transform where that converges, which leaves nothing between the two.
function between(events, neighbours, backward, asked) {
  if (!events.some((event) => (event.slots ?? 1) > 1)) {
    const make = (tilt, frequency) => events.map((event) => points(event, neighbours, backward, tilt, frequency, 1));
    const sharp = new Transform(make, neighbours.group ?? (neighbours === "replacement" ? 2 : 1)).near(asked);
    if (sharp) return [sharp, sharp];
  }
  return fromLattice(events, neighbours, backward, (asked.delta ?? 1e-6) * NEGLIGIBLE);
}

function solve(delta, of) {
  if (of(0) <= delta) return 0;
  let low = 0, high = 1;
  while (of(high) > delta && high < 1e6) high *= 2;
  for (let i = 0; i < 60; i++) {
    const middle = (low + high) / 2;
    if (of(middle) > delta) low = middle; else high = middle;
  }
  return high;
}

// Epsilon at delta of [{rate, sigma, count, slots}] together: an interval. `neighbours`: "record" (there or absent),
// {group: k} (k records, all there or all absent) or "replacement" (a record in the place of another).
function epsilonOf(events, delta, neighbours = "record") {
  if (!events.length) return { low: 0, high: 0 };
  const found = [false, true].map((backward) =>
    between(events, neighbours, backward, { delta }).map((of) => solve(delta, of)));
  return { low: Math.max(found[0][0], found[1][0]), high: Math.max(found[0][1], found[1][1]) };
}

// The largest share of true members that any test finds at each share of false alarms: the least that follows from delta
// at some epsilon, which is searched. `sharp`: no lattice was needed, so that rounding up finds the same.
function powers(events, alarms, roundedUp = false) {
  const lattice = [null, null], known = new Map();
  const delta = (epsilon) => {
    if (!known.has(epsilon)) known.set(epsilon, Math.max(0, ...[false, true].map((backward, i) => {
      if (!lattice[i]) {
        const [down, up] = between(events, "record", backward, { epsilon: Math.max(epsilon, 1e-6) });
        if (down === up) return up(epsilon);
        lattice[i] = roundedUp ? up : down;
      }
      return lattice[i](epsilon);
    })));
    return known.get(epsilon);
  };
  const most = epsilonOf(events, Math.min(...alarms) / 10).high || 1;
  const all = alarms.map((alpha) => {
    const found = (epsilon) => Math.min(Math.exp(Math.min(epsilon, 700)) * alpha + delta(epsilon),
      1 - Math.exp(-epsilon) * (1 - alpha - delta(epsilon)));
    let best = 0, width = most / 16;
    for (let k = 1; k <= 16; k++) if (found(k * width) < found(best)) best = k * width;
    for (let i = 0; i < 5; i++) {
      width /= 2;
      for (const next of [best - width, best + width]) if (next >= 0 && found(next) < found(best)) best = next;
    }
    return Math.min(1, found(best));
  });
  return Object.assign(all, { sharp: !lattice[0] && !lattice[1] });
}

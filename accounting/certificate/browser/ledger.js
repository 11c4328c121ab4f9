"use strict";
// Reads a ledger and a certificate, and says of each statement whether it holds. No part of it is taken from the Python
// code: it follows docs/accounting.md. What a reader cannot check here is said, never passed over.

class Refused extends Error {} // does not hold, in a sentence

// ---- JSON. Numbers that were written by another program are kept as they stand where bytes are signed.

function parseJson(text, { canonical = false, number = Number } = {}) {
  let at = 0, depth = 0;
  const fail = (why) => { throw new Refused(`is not JSON as this project writes it: ${why} at character ${at + 1}`); };
  const space = () => { while (" \t\r\n".includes(text[at]) && at < text.length) { if (canonical) fail("a space"); at++; } };
  const string = () => {
    const from = at++;
    while (text[at] !== '"') { if (at >= text.length) fail("no end of a text"); at += text[at] === "\\" ? 2 : 1; }
    at++;
    try { return JSON.parse(text.slice(from, at)); } catch { return fail("a text that cannot be read"); }
  };
  const value = () => {
    space();
    const head = text[at];
    if (head === '"') return string();
    if (head === "{" || head === "[") {
      if (++depth > 100) fail("more than 100 levels");
      const list = head === "[", found = list ? [] : Object.create(null), end = list ? "]" : "}";
      let before = null;
      at++; space();
      for (let first = true; text[at] !== end; first = false) {
        if (!first) { if (text[at] !== ",") fail(`no ${end}`); at++; space(); }
        if (list) found.push(value());
        else {
          if (text[at] !== '"') fail("no key");
          const key = string();
          if (key in found) fail(`the key ${key} twice`);
          if (canonical && before !== null && !(before < key)) fail("keys out of order");
          before = key; space();
          if (text[at] !== ":") fail("no colon");
          at++;
          found[key] = value();
        }
        space();
      }
      at++; depth--;
      return found;
    }
    for (const [word, meaning] of [["true", true], ["false", false], ["null", null]]) {
      if (text.startsWith(word, at)) { at += word.length; return meaning; }
    }
    const token = /-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?/y;
    token.lastIndex = at;
    const digits = token.exec(text)?.[0];
    if (!digits || !Number.isFinite(Number(digits))) fail("no value");
    at += digits.length;
    return number(digits);
  };
  const found = value();
  space();
  if (at < text.length) fail("more than one value");
  return found;
}

const quote = (text) => JSON.stringify(text).replace(/[\u007f-\uffff]/g,
  (each) => "\\u" + each.charCodeAt(0).toString(16).padStart(4, "0"));

// As Python's json.dumps(sort_keys=True, separators=(",", ":")) writes it; numbers are texts in an array of one.
function signedText(value) {
  if (value === null || typeof value === "boolean") return String(value);
  if (typeof value === "string") return quote(value);
  if (value instanceof Token) return value.digits;
  if (Array.isArray(value)) return `[${value.map(signedText).join(",")}]`;
  return `{${Object.keys(value).sort().map((key) => `${quote(key)}:${signedText(value[key])}`).join(",")}}`;
}

class Token { constructor(digits) { this.digits = digits; } }

// ---- SHA-256, of files of any size and without waiting for each of a hundred thousand short lines.

const K = new Uint32Array(64), START = new Uint32Array(8);
for (let n = 2, found = 0; found < 64; n++) {
  if ([...Array(n).keys()].slice(2).some((d) => n % d === 0)) continue;
  if (found < 8) START[found] = (Math.sqrt(n) % 1) * 2 ** 32;
  K[found++] = (Math.cbrt(n) % 1) * 2 ** 32;
}

class Sha256 {
  constructor() { this.h = START.slice(); this.w = new Uint32Array(64); this.rest = new Uint8Array(64); this.held = 0; this.size = 0; }

  update(bytes) {
    this.size += bytes.length;
    let at = 0;
    if (this.held) {
      const taken = Math.min(64 - this.held, bytes.length);
      this.rest.set(bytes.subarray(0, taken), this.held);
      this.held += taken; at = taken;
      if (this.held < 64) return this;
      this.block(this.rest, 0); this.held = 0;
    }
    for (; at + 64 <= bytes.length; at += 64) this.block(bytes, at);
    this.rest.set(bytes.subarray(at)); this.held = bytes.length - at;
    return this;
  }

  block(bytes, at) {
    const w = this.w, s = this.h;
    for (let i = 0; i < 16; i++, at += 4) w[i] = (bytes[at] << 24) | (bytes[at + 1] << 16) | (bytes[at + 2] << 8) | bytes[at + 3];
    for (let i = 16; i < 64; i++) {
      const x = w[i - 15], y = w[i - 2];
      w[i] = w[i - 16] + ((x >>> 7 | x << 25) ^ (x >>> 18 | x << 14) ^ (x >>> 3)) + w[i - 7] + ((y >>> 17 | y << 15) ^ (y >>> 19 | y << 13) ^ (y >>> 10));
    }
    let [a, b, c, d, e, f, g, h] = s;
    for (let i = 0; i < 64; i++) {
      const t = (h + ((e >>> 6 | e << 26) ^ (e >>> 11 | e << 21) ^ (e >>> 25 | e << 7)) + ((e & f) ^ (~e & g)) + K[i] + w[i]) | 0;
      const u = (((a >>> 2 | a << 30) ^ (a >>> 13 | a << 19) ^ (a >>> 22 | a << 10)) + ((a & b) ^ (a & c) ^ (b & c))) | 0;
      h = g; g = f; f = e; e = (d + t) | 0; d = c; c = b; b = a; a = (t + u) | 0;
    }
    s[0] += a; s[1] += b; s[2] += c; s[3] += d; s[4] += e; s[5] += f; s[6] += g; s[7] += h;
  }

  hex() {
    const size = this.size, end = new Uint8Array(((size + 72) & ~63) - size), view = new DataView(end.buffer);
    end[0] = 0x80;
    view.setUint32(end.length - 8, Math.floor(size / 2 ** 29)); view.setUint32(end.length - 4, (size * 8) >>> 0);
    this.update(end);
    return [...this.h].map((word) => word.toString(16).padStart(8, "0")).join("");
  }
}

const bytesOf = (text) => new TextEncoder().encode(text);
const bytesOfHex = (hex) => Uint8Array.from(hex.match(/../g) ?? [], (each) => parseInt(each, 16));

// ---- A ledger, line by line.

const LONGEST_LINE = 2 ** 24, LARGEST_JSON = 2 ** 26, PIECE = 2 ** 22;
// After these a certificate no longer covers its run; after a run was finished, there may be none of `NOT_AFTER`.
const UNCOVERED = new Set(["open", "commit", "segment", "origin", "lost", "tuning", "choice"]);
const NOT_AFTER = new Set(["plan", "nonprivate", "origin", "earlier", "public", "store", "word", "segment", "open", "commit", "finish"]);
const EXACT = "aes-256-ctr-exact";

// What a line of each kind says: exactly these fields, each of its type. JavaScript would compare "1" with 1, count with
// what is missing, and take 2^53 + 1 for 2^53.
const whole = Number.isSafeInteger, real = (value) => typeof value === "number", text = (value) => typeof value === "string";
const flag = (value) => typeof value === "boolean", above = (least) => (value) => real(value) && value > least;
const free = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
const among = (...words) => (value) => words.includes(value), either = (...kinds) => (value) => kinds.some((kind) => kind(value));
const list = (kind) => (value) => Array.isArray(value) && value.every((each) => kind(each));
const shape = (fields, optional = {}) => {
  const known = new Map(Object.entries({ ...fields, ...optional }));
  return (value) => free(value) && Object.keys(fields).every((key) => Object.hasOwn(value, key))
    && Object.keys(value).every((key) => known.get(key)?.(value[key]));
};
const within = (low, high) => (value) => whole(value) && value >= low && value <= high;
const sigmas = (value) => value >= 1e-9 && value <= 1e9; // beyond these, squares overflow
const SAMPLING = either(shape({ kind: among("poisson"), threshold: within(1, 2 ** 32) }),
  shape({ kind: among("cyclic-poisson"), threshold: within(1, 2 ** 32), parts: within(2, 256) }),
  shape({ kind: among("allocation"), slots: within(2, 2 ** 20) }));
const NOISE = either(shape({ kind: among("independent") }), shape({ kind: among("exact"), growth: (value) => value > 0 && value <= 1e-6 }),
  shape({ kind: among("banded"), rows: (rows) => list(list(real))(rows) && rows.length > 1 && rows.every((row, i) => row.length === i + 1), horizon: whole }));
const RELEASED = { name: text, bound: above(0), std: above(0) };
const METRIC = either(shape({ ...RELEASED, name: (name) => text(name) && name !== "accuracy" && name !== "clipped_share" }),
  shape({ ...RELEASED, name: among("accuracy"), bound: among(1), share: above(0) }),
  shape({ ...RELEASED, name: among("clipped_share"), bound: among(0.5),
    rule: shape({ quantile: above(0), learning_rate: above(0), lowest: above(0), highest: above(0) }) }));
const PLAN = shape({ records: within(1, Infinity), sampling: SAMPLING, clip_norm: above(0), noise_multiplier: above(0), steps: within(1, Infinity),
  delta: above(0), epsilon_budget: above(0), unit: text, adjacency: text }, { metrics: list(METRIC),
  units: shape({ by: text, rows: within(1, Infinity), reduce: among("mean", "sum"), table: text }), noise: NOISE, views: within(1, Infinity) });
const FACTS = shape({ sampling: shape({ rule: SAMPLING, records: whole, digest: text }),
  clipping: shape({ rule: among("flat", "automatic"), sensitivity: real }),
  noise: shape({ std: real, divisor: real, elements: within(1, Infinity), generator: among("aes-256-ctr", EXACT, "chacha20") },
    { grid: real, correlation: shape({ matrix: text, added: real }) }) },
  { metrics: list(shape({ name: text, sensitivity: real, std: real }, { grid: real })) });
const STEP = [{ phase: whole, segment: whole, step: whole, facts: FACTS }, { share: real }];
const EVENT = { rate: (value) => value > 0 && value <= 1, sigma: sigmas, count: within(0, Infinity) }, SLOTS = { slots: within(1, 2 ** 20) };
const RUNS = shape({ mean: (value) => value >= 1, shape: either(real, among("poisson")), fixed: flag });
const LINES = new Map(Object.entries({
  run: [{ format: text, name: text, key_check: text, debug: flag, versions: free, signer: text, record_digests: text }, { started: text }],
  plan: [{ phase: whole, name: text, plan: PLAN, method: free }],
  nonprivate: [{ phase: whole, name: text, public_data: flag, manifest_digest: text }],
  tuning: [{ statement: text, runs: either(among(null), (runs) => RUNS(runs) && (whole(runs.mean) || !runs.fixed)) }],
  segment: [{ phase: whole, number: whole, salt: text, config_digest: text, manifest_digest: text, from_step: whole, reason: text, keys: among("ratchet") }],
  open: STEP, commit: STEP,
  checkpoint: [{ phase: whole, segment: whole, step: whole, digest: text }],
  copied: [{ reason: text, id: text }],
  lost: [{ length: whole, head: text, charged: list(shape({ ...EVENT, phase: whole }, SLOTS)) }],
  resume: [{ phase: whole, step: whole }], recovered: [{ torn_bytes: whole }], choice: [{ by: text }],
  public: [{ phase: whole, use: text, digest: text }], store: [{ phase: whole, host: text }], word: [{ what: text }],
  origin: [{ run: text, id: text, epsilon: real, delta: real, protected: list(text) }, { unit: text }],
  earlier: [{ digest: text }], finish: [{}],
}).map(([kind, [fields, optional]]) => [kind, shape({ index: whole, kind: text, previous: text, hash: text, ...fields }, optional)]));

// The unit and its neighbours, in words: those of what is clipped.
function words(units) {
  const quoted = (name) => {
    const mark = name.includes("'") && !name.includes('"') ? '"' : "'", safe = name.replaceAll("\\", "\\\\");
    return mark + (mark === "'" ? safe.replaceAll("'", "\\'") : safe) + mark;
  };
  const noun = units ? "unit" : "record", same = units?.by.startsWith("key:")
    ? `in whose keys the pattern ${quoted(units.by.slice(4))} finds the same` : `that have the same ${quoted(units?.by ?? "")}`;
  return { noun, unit: units ? `one unit (all records ${same}; a record without one is a unit of its own)`
    : "one record (what the data set has as one: an image, an image with its caption, a text, a row)",
    adjacency: `zero-out: one ${noun} is replaced by a ${noun} that is drawn alike and contributes exactly zero` };
}

const close = (a, b) => Math.abs(a - b) <= 1e-11 * Math.abs(b);
const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);

// How far one record moves what the draws of correlated noise are added to: the longest column of the inverse of B.
function sensitivityOf(rows) {
  let longest = 0;
  for (let column = 0; column < rows.length; column++) {
    const found = [];
    for (let i = column; i < rows.length; i++) {
      let left = i === column ? 1 : 0;
      for (let j = column; j < i; j++) left -= rows[i][j] * found[j - column];
      found.push(left / rows[i][i]);
    }
    longest = Math.max(longest, Math.hypot(...found));
  }
  return longest;
}

class Ledger {
  constructor() {
    this.hashes = []; this.lastUncovered = 0; this.plans = new Map(); this.names = new Map(); this.nonprivate = new Map();
    this.segments = []; this.charges = new Map(); this.lost = []; this.tunings = []; this.withoutNoise = new Set();
    this.protected = new Set(); this.faults = []; this.late = []; this.choices = 0; this.finished = false; this.steps = 0;
    this.committed = new Map(); this.norms = new Map(); this.words = [];
  }

  async read(file, progress = () => {}) {
    let rest = new Uint8Array(0), done = 0;
    const latin = new TextDecoder("latin1");
    for (let at = 0; at < file.size; at += PIECE) {
      const piece = new Uint8Array(await file.slice(at, at + PIECE).arrayBuffer());
      const bytes = new Uint8Array(rest.length + piece.length);
      bytes.set(rest); bytes.set(piece, rest.length);
      let from = 0;
      for (let end; (end = bytes.indexOf(10, from)) >= 0; from = end + 1) this.line(bytes.subarray(from, end), latin);
      rest = bytes.slice(from);
      if (rest.length > LONGEST_LINE) throw new Refused("is no ledger: it has a line of over 16 MiB");
      progress((done = at + piece.length) / file.size);
      await new Promise((go) => setTimeout(go));
    }
    if (rest.length) throw new Refused(`line ${this.hashes.length + 1} is torn: the end of the file is missing`);
    if (!this.run) throw new Refused("is empty, so it describes no run");
    return this;
  }

  line(bytes, latin) {
    const number = this.hashes.length, where = `line ${number + 1}`, text = latin.decode(bytes);
    let entry;
    try { entry = parseJson(text, { canonical: true }); } catch (error) {
      throw new Refused(number ? `${where} ${error.message}; it was changed after it was written` : "is not a ledger of this project");
    }
    const own = `"hash":${JSON.stringify(entry?.hash)},`, place = text.indexOf(own);
    if (typeof entry?.hash !== "string" || place < 0 || /[^ -~]/.test(text)) throw new Refused(`${where} is not an entry of a ledger`);
    if (entry.index !== number || entry.previous !== (this.hashes[number - 1] ?? "0".repeat(64))) {
      throw new Refused(`${where} does not follow the line before it; a line was removed, added or changed`);
    }
    const hash = new Sha256().update(bytes.subarray(0, place)).update(bytes.subarray(place + own.length)).hex();
    if (hash !== entry.hash) throw new Refused(`${where} does not match its own hash, so it was changed after it was written`);
    this.hashes.push(hash);
    if (UNCOVERED.has(entry.kind)) this.lastUncovered = number + 1;
    try { this.take(entry, text); } catch (error) {
      throw new Refused(error instanceof Refused ? `${where}: ${error.message}` : `${where} lacks what a line of its kind says`);
    }
  }

  take(entry, text) {
    const { kind, phase } = entry;
    if (!LINES.has(kind)) throw new Refused(`a line of the unknown kind ${kind}; open it with a newer page`);
    if ((kind === "run") !== (entry.index === 0)) throw new Refused("a ledger begins with one run and has no other");
    if (kind === "run" && entry.format !== "murmuration-ledger/1") throw new Refused(`the format ${entry.format} is not known to this page`);
    if (this.finished && NOT_AFTER.has(kind)) throw new Refused(`a line of kind ${kind} after the run was finished`);
    if (!LINES.get(kind)(entry)) throw new Refused(`a line of kind ${kind} that lacks a field, or has a strange one`);
    if (kind === "run") {
      this.run = entry;
    } else if (kind === "plan") this.plan(entry, text);
    else if (kind === "nonprivate") {
      if (this.plans.has(phase)) throw new Refused("a private phase that trains without noise");
      this.names.set(phase, entry.name);
      this.nonprivate.set(phase, entry.public_data === true && (this.nonprivate.get(phase) ?? true));
      this.withoutNoise.add(entry.manifest_digest);
    } else if (kind === "segment") this.segment(entry);
    else if (kind === "open") this.open(entry);
    else if (kind === "commit") this.commit(entry);
    else if (kind === "lost") {
      for (const each of entry.charged) {
        if (!this.plans.has(each.phase)) throw new Refused("steps are charged to a phase without a plan");
        const { rate, sigma, count, slots = 1 } = each;
        if (slots > 1 && rate !== 1 / slots) throw new Refused("an epoch at another rate than one in its steps");
        this.lost.push({ rate, sigma, count, slots });
      }
    } else if (kind === "tuning") this.tunings.push(entry);
    else if (kind === "choice") this.choices++;
    else if (kind === "public") {
      if (["evaluation", "monitor", "mixing"].includes(entry.use)) this.withoutNoise.add(entry.digest);
      this.words.push(entry);
    } else if (kind === "earlier") this.withoutNoise.add(entry.digest);
    else if (kind === "store" || kind === "origin" || kind === "word") this.words.push(entry);
    else if (kind === "finish") this.finished = true;
  }

  plan({ phase, plan, name }, text) {
    if (this.plans.has(phase) || this.nonprivate.has(phase)) throw new Refused(`a second plan of phase ${phase}`);
    const { sampling, noise } = plan, bands = noise?.kind === "banded" ? noise.rows.length : 1;
    plan.parts = sampling.kind === "cyclic-poisson" ? sampling.parts : 1;
    plan.slots = sampling.kind === "allocation" ? sampling.slots : 1;
    plan.rate = plan.slots > 1 ? 1 / plan.slots : sampling.threshold / 2 ** 32;
    const { unit, adjacency } = words(plan.units), [other] = this.plans.values(), names = (plan.metrics ?? []).map((each) => each.name);
    if (plan.delta * plan.records > 1 + 1e-9 || !sigmas(this.planned(plan))) throw new Refused("the plan's numbers are no private training");
    if (plan.unit !== unit || plan.adjacency !== adjacency) throw new Refused(`a plan that protects ${plan.unit} and not what it clips`);
    if (other && other.unit !== unit) throw new Refused("two plans that protect different units, so there is no one claim");
    if (new Set(names).size < names.length || (names.includes("accuracy") && (plan.units || names.includes("clipped_share")))) {
      throw new Refused("metrics that do not go together");
    }
    if (bands !== plan.parts) throw new Refused("correlated noise whose bands are not the parts that take turns");
    if (bands > 1) {
      if (!(sensitivityOf(noise.rows) <= 1 + 1e-9)) throw new Refused("the matrix of correlated noise hides less than it should");
      const { rows } = parseJson(text, { number: (digits) => new Token(digits) }).plan.noise;
      plan.matrix = new Sha256().update(bytesOf(signedText(rows))).hex();
    }
    plan.adaptive = (plan.metrics ?? []).find((each) => each.name === "clipped_share")?.rule;
    if (this.steps) this.late.push(phase);
    this.plans.set(phase, plan); this.names.set(phase, name); this.committed.set(phase, 0); this.norms.set(phase, []);
  }

  segment(entry) {
    const plan = this.plans.get(entry.phase), before = this.segments.filter((each) => each.phase === entry.phase).length;
    if (!plan) throw new Refused("a segment of a phase without a plan");
    if (entry.number !== before || !(entry.from_step >= 0 && entry.from_step <= plan.steps)) throw new Refused("a segment out of order");
    this.protected.add(entry.manifest_digest);
    this.segments.push({ ...entry, opened: entry.from_step, committed: entry.from_step, norms: new Map() });
  }

  // What one step is to a record: the noise over what a record moves, of everything that was drawn together.
  sigma(plan, facts) {
    const released = [[facts.clipping.sensitivity, facts.noise.std], ...(facts.metrics ?? []).map((each) => [each.sensitivity, each.std])];
    if (!released.every(([moved, std]) => moved > 0 && std > 0)) return NaN;
    return 1 / Math.sqrt(released.reduce((sum, [moved, std]) => sum + (moved / std) ** 2, 0)) / (1 + (plan.noise?.growth ?? 0));
  }

  planned(plan) {
    return this.sigma(plan, { clipping: { sensitivity: 1 }, noise: { std: plan.noise_multiplier },
      metrics: (plan.metrics ?? []).map(({ bound, std }) => ({ sensitivity: bound, std })) });
  }

  open(entry) {
    const segment = this.segments.at(-1), plan = this.plans.get(entry.phase), { facts, step } = entry;
    if (!segment || segment.phase !== entry.phase || segment.number !== entry.segment) throw new Refused("a step outside the current segment");
    if (step !== segment.opened + 1 || segment.opened !== segment.committed || step > plan.steps) {
      throw new Refused(`step ${step} of phase ${entry.phase} was opened out of turn`);
    }
    const fault = this.departure(plan, segment, facts, step);
    if (fault) throw new Refused(`step ${step} of phase ${entry.phase} ${fault}`);
    segment.opened = step; segment.facts = facts;
    this.steps++;
    this.charge(entry, this.sigma(plan, facts));
  }

  // How a step departs from its frozen plan.
  departure(plan, segment, facts, step) {
    const { sampling, clipping, noise, metrics = [] } = facts, norm = this.norm(plan, segment, step, clipping.sensitivity);
    if (!same(sampling.rule, plan.sampling)) return "draws its records in another way than its plan says";
    if (sampling.records !== plan.records) return `draws from ${sampling.records} records, not ${plan.records}`;
    if (norm === null || !close(clipping.sensitivity, norm)) return `clips at ${clipping.sensitivity}, which is not what its plan gives`;
    if (!close(noise.std, plan.noise_multiplier * norm)) return `has noise of ${noise.std}, not ${plan.noise_multiplier * norm}`;
    if (!close(noise.divisor, (plan.rate * plan.records) / plan.parts)) return "is divided by another number than the expected batch";
    if (!same(metrics.map(({ name, sensitivity, std }) => [name, sensitivity, std]),
      (plan.metrics ?? []).map(({ name, bound, std }) => [name, bound, std]))) return "publishes other numbers of its records than its plan says";
    const exact = plan.noise?.kind === "exact";
    if (exact !== (noise.generator === EXACT)) return "has exact noise where its plan has none, or none where it has";
    for (const [grid, elements, moved] of [[noise.grid ?? 0, noise.elements, clipping.sensitivity], ...metrics.map((each) => [each.grid ?? 0, 1, each.sensitivity])]) {
      const fits = grid > 0 && Number.isInteger(Math.log2(grid)) && grid * Math.sqrt(elements) <= plan.noise?.growth * moved;
      if (exact ? !fits : grid) return "is rounded to a grid that its plan does not charge";
    }
    if (plan.matrix) {
      const row = plan.noise.rows[(step - 1) % plan.noise.rows.length];
      const used = row.filter((_, place) => step - row.length + 1 + place > segment.from_step);
      if (noise.correlation?.matrix !== plan.matrix || !close(noise.correlation.added, noise.std * Math.hypot(...used))) return "has noise of another matrix than its plan says";
    } else if (noise.correlation) return "has correlated noise, of which its plan says nothing";
    const acting = [clipping.rule, noise.generator, noise.elements];
    if (segment.acting && !same(segment.acting, acting)) return "trains other weights, or in another way, than the steps before it";
    segment.acting = acting;
    return null;
  }

  // C of a step: the plan's, or what the released share of clipped records made of the one before.
  norm(plan, segment, step, stated) {
    if (!plan.adaptive || step === 1) return plan.clip_norm;
    const before = step === segment.from_step + 1 ? this.segments.filter((each) => each.phase === segment.phase) : [segment];
    const possible = before.map((each) => each.norms.get(step)).filter((each) => each !== undefined);
    return possible.find((each) => close(stated, each)) ?? null;
  }

  commit(entry) {
    const segment = this.segments.at(-1), plan = this.plans.get(entry.phase), { facts, step } = entry;
    if (!segment || segment.phase !== entry.phase || segment.number !== entry.segment || step !== segment.opened || segment.committed === step) {
      throw new Refused("a step was committed without being open, or twice");
    }
    segment.committed = step;
    this.committed.set(entry.phase, Math.max(step, this.committed.get(entry.phase)));
    if (plan.adaptive) {
      const { quantile, learning_rate, lowest, highest } = plan.adaptive, share = Math.min(1, Math.max(0, entry.share));
      if (entry.share === undefined) throw new Refused(`step ${step} was committed without its share of clipped records`);
      segment.norms.set(step + 1, Math.min(highest, Math.max(lowest, facts.clipping.sensitivity * Math.exp(learning_rate * (share - 1 + quantile)))));
    }
    if (same(facts, segment.facts)) return;
    const weaker = { ...facts, clipping: { ...facts.clipping, sensitivity: 0 }, noise: { ...facts.noise, std: 0 }, metrics: (facts.metrics ?? []).map((each) => ({ ...each, sensitivity: 0, std: 0 })) };
    const told = segment.facts, announced = { ...told, clipping: { ...told.clipping, sensitivity: 0 }, noise: { ...told.noise, std: 0 }, metrics: (told.metrics ?? []).map((each) => ({ ...each, sensitivity: 0, std: 0 })) };
    const sigma = this.sigma(plan, facts);
    if (!same(weaker, announced) || !sigmas(sigma)) this.faults.push(`step ${step} of phase ${entry.phase} did something else than it had announced`);
    else this.charge(entry, sigma);
  }

  // Each step, or epoch of random allocation, counts once in its segment, with the least noise of its own.
  charge({ phase, segment, step }, sigma) {
    const plan = this.plans.get(phase), turn = plan.slots > 1 ? Math.floor((step - 1) / plan.slots) : step;
    const planned = this.planned(plan), exact = close(sigma, planned) ? planned : sigma;
    const name = `${phase} ${segment} ${turn}`;
    const last = this.last?.name === name ? this.last : null;
    if (last && last.sigma <= exact) return;
    if (last) last.counts.set(last.part, last.counts.get(last.part) - 1);
    const key = `${phase} ${exact}`, part = step % plan.parts;
    if (!this.charges.has(key)) this.charges.set(key, { plan, sigma: exact, counts: new Map() });
    const { counts } = this.charges.get(key);
    counts.set(part, (counts.get(part) ?? 0) + 1);
    this.last = { name, sigma: exact, counts, part };
  }

  // What the steps that were opened are to one record.
  events() {
    const found = [...this.charges.values()].map(({ plan, sigma, counts }) =>
      ({ rate: plan.rate, sigma, count: Math.max(...counts.values()), slots: plan.slots }));
    return merged([...found, ...this.lost]);
  }

  // Why nothing may be claimed.
  objection() {
    if (this.run.debug) return "its keys come from a seed that the user gave (debug)";
    for (const [phase, open] of this.nonprivate) if (!open) return `phase ${this.names.get(phase)} trained without noise on data that nobody called public`;
    if ([...this.withoutNoise].some((digest) => this.protected.has(digest))) return "records that a phase protects were used without noise";
    if (this.faults.length) return this.faults[0];
    if (this.tunings.some((each) => !each.runs)) return "it was tuned on private data by a number of runs that is not charged";
    if (this.late.length && this.tunings.length) return "it was chosen among several runs, and a plan was declared late";
    return this.plans.size ? null : "no phase of it was private";
  }

  // All steps of all plans, as they were planned; a block or an epoch that was cut counts as whole.
  plannedEvents() {
    return merged([...this.plans.values()].map((plan) => ({ rate: plan.rate, sigma: this.planned(plan), slots: plan.slots,
      count: Math.ceil(plan.steps / Math.max(plan.parts, plan.slots)) })));
  }

  // Of how many runs this one was chosen, where that number was fixed.
  times() { return Math.max(1, ...this.tunings.map((each) => (each.runs?.fixed ? each.runs.mean : 1))); }

  // Whether nothing but one epsilon at one delta is proved.
  onePoint() { return this.late.length > 0 || this.tunings.some((each) => each.runs && !each.runs.fixed); }

  // Whether outputs may have decided how long it ran, so that the planned budget is the claim.
  mustClaimBudget() {
    const cut = [...this.plans].some(([phase, plan]) => this.committed.get(phase) < plan.steps
      && (this.finished || [...this.names.keys()].some((later) => later > phase)));
    return cut || this.choices > 0 || this.late.length > 0 || this.segments.some((each) => each.number > 0);
  }
}

function merged(events) {
  const found = new Map();
  for (const each of events) {
    const key = `${each.rate} ${each.sigma} ${each.slots ?? 1}`, before = found.get(key);
    if (before) before.count += each.count; else found.set(key, { slots: 1, ...each });
  }
  return [...found.values()].filter((each) => each.count > 0);
}

// ---- What a certificate says, against the ledger. Findings are {state: "holds" | "fails" | "open", text, decisive}:
// without what is decisive, a page must not say that a claim holds.

// By how much two accountants may differ, and where both put losses on lattices, besides the interval of this page's.
const AGREEMENT = 2e-3, ON_LATTICES = 5e-2;
// Beyond this, or where it is NaN, an interval says nothing.
const near = ({ low, high }) => Math.abs(high - low) <= 0.1 * high + 1e-3;
// An ε is too low if it is below the interval, and no less than what is true if it is at its end. Between them, this
// page cannot tell.
const verdict = (stated, { low, high }) => (!(stated >= low * (1 - 1e-6) - 1e-9) ? "fails" : stated < high * (1 - AGREEMENT) ? "open" : "holds");

async function judge({ ledger, certificate, signed, files = [] }) {
  const found = [], claim = certificate?.claim ?? {};
  const say = (state, text, decisive = false) => { found.push({ state, text, decisive }); };
  say("holds", `${ledger.hashes.length.toLocaleString("en")} lines of the ledger follow one another, and none was changed.`);
  say("holds", `${ledger.steps.toLocaleString("en")} private steps were opened, each as its frozen plan says.`);
  if (certificate === undefined) say("open", "There is no certificate here, so nothing is compared with one.");
  else {
    const { length, head } = certificate.ledger, line = whole(length) ? ledger.hashes[length - 1] : undefined;
    if (line === undefined || line !== head) say("fails", "The certificate was written for another ledger, or this one was cut or rewritten.");
    else if (ledger.lastUncovered > length) say("fails", "The run went on after the certificate was written, so it no longer covers it.");
    else say("holds", `Line ${length.toLocaleString("en")} of the ledger is the one that the certificate names.`);
    found.push(await signatureOf(certificate, signed, ledger.run.signer));
    const { one_run: canaries = {}, replay = {} } = certificate.audit ?? {};
    if (canaries.refuted?.length || replay.refuted) say("fails", "REFUTED: the run's own audit found that its claim does not hold.");
    else if (certificate.audit) say("open", "The run's own audit is evidence beside the claim; its numbers are not computed anew here.");
    if (typeof claim.private !== "boolean") say("fails", "The certificate does not say whether it claims privacy.");
    const [{ unit, adjacency }] = [...ledger.plans.values(), words()], own = { run: ledger.run.name, unit, adjacency };
    for (const [name, value] of Object.entries(own)) if (certificate[name] !== value) say("fails", `The certificate's ${name} is not that of the ledger, ${value}.`);
  }
  const objection = ledger.objection();
  if (objection) say(claim.private === true ? "fails" : "open", `NOT PRIVATE: ${objection}.`);
  else if (claim.private === false) say("open", "The certificate itself makes no claim of privacy.");
  if (!ledger.plans.size || ledger.faults.length) return found;
  found.curve = epsilons(ledger, certificate, say);
  await weights(certificate, files, say);
  if (ledger.words.length) say("open", `Lines of the ledger on what no ε covers, or on what is so by the owner's word alone: ${ledger.words.length}; see the known deviations.`);
  say("open", "Not compared: the certificate's account of its mechanism, phases, dates, deviations, other runs and Gaussian fit; account.py verify does. Not in the ledger: that the program did what it reported, that its keys were secret, and that the data are what the run was told.");
  return found;
}

async function signatureOf(certificate, signed, signer) {
  const { algorithm, public_key: key, value } = certificate.signature ?? {};
  if (!/^[0-9a-f]{128}$/.test(value)) return { state: "fails", text: "The certificate carries no signature." };
  if (algorithm !== "Ed25519" || key !== signer || !/^[0-9a-f]{64}$/.test(key)) return { state: "fails", text: "The certificate is not signed by the key in the ledger's first line." };
  let valid;
  try {
    const imported = await crypto.subtle.importKey("raw", bytesOfHex(key), "Ed25519", false, ["verify"]);
    const { signature, ...rest } = signed;
    valid = await crypto.subtle.verify("Ed25519", imported, bytesOfHex(value), bytesOf(signedText(rest)));
  } catch {
    return { state: "open", decisive: true, text: "The signature: this browser cannot check Ed25519 signatures; use a newer one, or account.py verify." };
  }
  if (!valid) return { state: "fails", text: "The certificate was changed after it was signed." };
  return { state: "holds", text: `The certificate is signed by the run's key ${key}; compare it with the one that a log of runs or a witness names.` };
}

function epsilons(ledger, certificate, say) {
  const deltas = new Set([...ledger.plans.values()].map((plan) => plan.delta)), [delta] = deltas, claim = certificate?.claim;
  if (deltas.size > 1) return say("fails", "The ledger has several values of delta, so no single claim can be made.");
  const compare = (name, stated, { low, high }, decisive = false) => {
    const shown = low === high ? high.toFixed(6) : `${low.toFixed(6)} to ${high.toFixed(6)}`;
    if (!near({ low, high })) return say("open", `${name}: this page comes no closer than ${shown}; account.py verify can.`);
    const room = (low < high ? ON_LATTICES : AGREEMENT) * high + (high - low) + 1e-6;
    if (typeof stated !== "number") say("fails", `${name}: the certificate states no ε, and the ledger has steps.`);
    else if (verdict(stated, { low, high }) === "fails") say("fails", `${name}: the certificate says ε = ${stated}, and this page finds ${shown}.`);
    else if (stated > high + room) say("fails", `${name}: the certificate says ε = ${stated}, above what this page finds, ${shown}: it is of another run.`);
    else say(verdict(stated, { low, high }), `${name}: ε = ${stated}; computed anew in this page ${shown}.`, decisive);
  };
  const events = ledger.events(), spent = epsilonOf(events, delta);
  if (!near(spent)) throw new Refused("the ε of such steps is not found closely enough by this page; use account.py verify");
  if (!certificate) return say("open", `The steps of the ledger cost ε = ${spent.high.toFixed(6)} at δ = ${delta}, by this page; nothing is claimed.`);
  if (claim.delta !== delta) say("fails", `The certificate says δ = ${claim.delta}, the ledger ${delta}.`);
  compare("Spent", claim.epsilon, spent, true);
  const [{ unit }] = ledger.plans.values(), at = delta * (1 + ledger.late.length);
  if (ledger.late.length ? !close(claim.delta_claimed, at) : "delta_claimed" in claim) say("fails", `The claim is at δ = ${at}, and the certificate claims it at δ = ${claim.delta_claimed}.`);
  const said = /^\(([\d.e+-]+), ([\d.e+-]+)\)-differential privacy for (.*), for everything that this run released$/.exec(claim.statement);
  if (claim.private && !(said && Number(said[1]) >= claim.epsilon_claimed && Number(said[2]) >= at && said[3] === unit)) {
    say("fails", `The certificate's sentence is not that of its numbers: (${claim.epsilon_claimed}, ${at}) for ${unit}.`);
  }
  const budget = [...ledger.plans.values()].reduce((sum, plan) => sum + plan.epsilon_budget, 0);
  const low = ledger.mustClaimBudget() ? Math.max(budget, spent.low) : spent.low, asked = { low, high: Math.max(low, spent.high) };
  const claimed = verdict(real(claim.epsilon_claimed) ? claim.epsilon_claimed : NaN, asked);
  if (claim.epsilon_budget !== budget) say("fails", `The certificate says that the budget is ε = ${claim.epsilon_budget}; it is ${budget}.`);
  if (!(claim.epsilon_rounded_up >= claim.epsilon)) say("fails", "The certificate's rounded ε is below its ε.");
  if (claimed === "fails") {
    say("fails", `The certificate claims ε = ${claim.epsilon_claimed}, below ${low.toFixed(6)}${low === budget ? ", the budget, which it must claim since outputs may have decided how the run went" : ""}.`);
  } else say(claimed, `${claim.private === true ? "Claimed" : "Charged, and not claimed"}: ε = ${claim.epsilon_claimed} at δ = ${at}; the ledger asks for ${asked.high.toFixed(6)} at most.`, true);
  const runs = ledger.tunings.filter((each) => each.runs);
  if (runs.length && runs.every((each) => each.runs.fixed)) {
    // Where each of them may have been cut short by its outputs, what they had planned is what they may have spent.
    const most = ledger.times(), cut = ledger.mustClaimBudget();
    const [all, planned] = [events, ledger.plannedEvents()].map((one) => epsilonOf(one.map((each) => ({ ...each, count: each.count * most })), delta));
    if (cut && planned.low > all.low) Object.assign(all, planned);
    if (cut && ledger.segments.some((each) => each.number > 0)) say("open", "Whether the claim covers all steps that the budget would have allowed in each of several runs.", true);
    say(verdict(claim.epsilon_claimed, all), `Chosen among ${most} runs, which together cost ε = ${all.high.toFixed(6)}.`, true);
  } else if (runs.length) say("open", "The cost of choosing among a random number of runs is not computed in this page.", true);
  return rows(certificate.limits, ledger, { ...claim, at }, compare, say);
}

// The other rows of a certificate: more records of a person, an exchanged record, other deltas, the trade-off.
function rows(limits, ledger, claim, compare, say) {
  if (!limits || limits.events === null) return say(ledger.onePoint() ? "open" : "fails", "Limits, and rows for groups, exchanged records and other deltas, are not stated by the steps that they are of.");
  if (!list(shape(EVENT, SLOTS))(limits.events) || limits.delta !== claim.at || !list(shape({ false_alarms: real, at_most: real }))(limits.true_positives)) {
    return say("fails", "The certificate's limits are of no private training.");
  }
  if (ledger.onePoint()) return say("fails", "The certificate states limits, and nothing but its ε and δ is proved.");
  const events = merged(limits.events), [{ delta, epsilon_budget: budget }] = ledger.plans.values(), runs = ledger.times();
  // Each step that is charged needs one of its own among those that are stated, and no stated one is of another kind.
  const left = events.map((each) => ({ ...each })), charged = ledger.events(), alike = (a, b) => a.rate === b.rate && close(a.sigma, b.sigma) && a.slots === b.slots;
  for (const { count, ...each } of charged) {
    let lacking = count * runs;
    for (const stated of left.filter((event) => alike(event, each))) {
      const taken = Math.min(lacking, stated.count);
      lacking -= taken; stated.count -= taken;
    }
    if (lacking) return say("fails", "The certificate's limits leave out steps that the ledger charges.");
  }
  if (!events.every((event) => [...charged, ...ledger.plannedEvents()].some((each) => alike(event, each)))) return say("fails", "The certificate's limits are of steps that this run has not.");
  if (ledger.mustClaimBudget()) {
    if (ledger.plans.size > 1) say("open", "Whether the limits are of all steps that the budgets of several phases would have allowed.");
    else if (epsilonOf(events.map((each) => ({ ...each, count: each.count / runs })), delta).high < budget * (1 - AGREEMENT)) return say("fails", "The certificate's limits leave out steps that its budget would have allowed.");
  }
  const plain = events.every((event) => event.slots === 1);
  for (const { epsilon, reason, ...whose } of limits.groups) {
    const [[noun, k]] = Object.entries(whose);
    if (noun !== `${words([...ledger.plans.values()][0].units).noun}s` || !within(1, 1000)(k)) return say("fails", `The certificate has a row for ${k} ${noun}.`);
    if (epsilon !== null && plain) compare(`${k} ${noun} of one person`, epsilon, epsilonOf(events, limits.delta, { group: k }));
    else if (epsilon !== null) say("fails", "A row for several records where nothing is proved for them.");
  }
  if (limits.replacement.epsilon !== null && plain) compare("An exchanged record", limits.replacement.epsilon, epsilonOf(events, limits.delta, "replacement"));
  for (const { delta: other, epsilon } of limits.other_deltas) {
    if (!(other > 0 && other < 1)) return say("fails", `The certificate has a row for δ = ${other}.`);
    if (epsilon !== null) compare(`At δ = ${other}`, epsilon, epsilonOf(events, other));
  }
  const alarms = limits.true_positives.map((each) => each.false_alarms);
  if (!alarms.length || !alarms.every((each) => each > 0 && each < 1)) return say("fails", "The certificate's shares of false alarms are no shares.");
  const found = powers(events, alarms);
  if (!(limits.best_guess >= Math.max(0.5, ...alarms.map((alpha, k) => (1 + found[k] - alpha) / 2)) * (1 - AGREEMENT))) {
    say("fails", `The certificate says that at most ${limits.best_guess} of all guesses are right, less than what its steps allow.`);
  }
  const wrong = alarms.findIndex((_, k) => !(limits.true_positives[k].at_most >= found[k] * (1 - AGREEMENT)));
  const most = found.sharp ? found : powers(events, alarms, true), sure = alarms.every((_, k) => limits.true_positives[k].at_most >= most[k] * (1 - AGREEMENT));
  if (wrong < 0) say(sure ? "holds" : "open", `The limits of every attack, at ${found.length} shares of false alarms.`);
  else {
    say("fails", `At ${alarms[wrong]} false alarms the certificate says that at most ${limits.true_positives[wrong].at_most} of the true members are found; this page finds ${found[wrong]}.`);
  }
  return alarms.map((alpha, k) => [alpha, found[k]]);
}

// Files of weights, and the list by which they are certified.
async function weights(certificate, files, say) {
  const certified = certificate?.weights ?? [], given = files.filter((file) => file.name.endsWith(".safetensors"));
  if (!certified.length) { if (given.length) say("open", "Weights: the certificate names none."); return; }
  const beside = files.find((file) => file.name === "weights.json");
  if (!beside) return say("open", `Weights: drop weights.json${given.length ? "" : " and the exported files"} here, too.`);
  const lists = parseJson(await beside.text());
  if (Object.keys(lists).length !== certified.length) return say("fails", "weights.json has other lists than those that were certified.");
  for (const { phase, step, sha256 } of certified) {
    const name = `phase${String(phase).padStart(2, "0")}-step${String(step).padStart(8, "0")}`, tensors = lists[name] ?? {};
    if (new Sha256().update(bytesOf(signedText(tensors))).hex() !== sha256) return say("fails", `weights.json is not the one that was certified for ${name}.`);
  }
  say("holds", "weights.json is the list of tensors that was certified.");
  for (const file of given) {
    const { all, strange } = await unlike(file, Object.values(lists), file.name.startsWith("averaged") ? "averaged/" : "");
    const foreign = strange.find((each) => !each.elsewhere);
    if (!strange.length) say("holds", `${file.name}: every tensor is a certified one.`);
    else if (foreign) say("open", `${file.name}: its tensor ${foreign.name} is under no certified name, and equals no certified tensor. Where an export cut or computed it, account.py verify can follow that.`);
    else say("open", `${file.name}: ${strange.length} of its ${all} tensors are certified ones under other names, such as ${strange[0].name}. Whether each stands where it belongs is not checked here; account.py verify follows an export's renamed.json.`);
  }
}

// How many tensors a file has, and those that are not the certified ones of their names in the list that fits best, with whether another name has them there.
async function unlike(file, lists, prefix) {
  const size = Number(new DataView(await file.slice(0, 8).arrayBuffer()).getBigUint64(0, true));
  if (!(size <= 100 * 2 ** 20)) throw new Refused(`${file.name} is not a safetensors file`);
  const header = parseJson(await file.slice(8, 8 + size).text()), left = lists.map(() => []), held = lists.map((list) => new Set(Object.values(list)));
  const ends = Object.entries(header).filter(([key]) => key !== "__metadata__").map(([, each]) => each.data_offsets).sort(([a, b], [c, d]) => a - c || b - d);
  if (!ends.length || ends.some(([from, to], k) => from !== (k ? ends[k - 1][1] : 0) || !(to >= from)) || file.size !== 8 + size + ends.at(-1)[1]) {
    throw new Refused(`${file.name} has bytes that belong to no tensor`);
  }
  for (const [name, { dtype, shape, data_offsets: [from, to] }] of Object.entries(header).filter(([key]) => key !== "__metadata__")) {
    const hash = new Sha256().update(bytesOf(`${dtype} [${shape.join(", ")}]\n`));
    for (let at = from; at < to; at += PIECE) hash.update(new Uint8Array(await file.slice(8 + size + at, 8 + size + Math.min(to, at + PIECE)).arrayBuffer()));
    const digest = hash.hex();
    lists.forEach((list, k) => { if (list[prefix + name] !== digest) left[k].push({ name, elsewhere: held[k].has(digest) }); });
  }
  const foreign = (strange) => strange.filter((each) => !each.elsewhere).length;
  const [strange] = left.sort((a, b) => foreign(a) - foreign(b) || a.length - b.length);
  return { all: ends.length, strange };
}

// A dropped or embedded certificate: its values, and the same with every number as it was written.
function readCertificate(text) {
  if (text.length > LARGEST_JSON) throw new Refused("is larger than 64 MiB, and no certificate is");
  const certificate = parseJson(text);
  if (certificate?.format !== "murmuration-certificate/1") throw new Refused(`is no certificate that this page can check (format ${certificate?.format})`);
  return { certificate, signed: parseJson(text, { number: (digits) => new Token(digits) }) };
}

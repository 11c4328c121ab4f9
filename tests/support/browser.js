// Runs the scripts of a certificate's page in Node: node browser.js SCRIPTS_FOLDER, with jobs as JSON on standard input.
// {plans: [{events, delta, neighbours}], runs: [folders], units: [units of plans], change: [text, other text]}: `change` makes a mutant.
"use strict";
const fs = require("node:fs"), path = require("node:path"), { webcrypto } = require("node:crypto");

const jobs = JSON.parse(fs.readFileSync(0, "utf8"));
let script = ["accountant.js", "ledger.js"].map((name) => fs.readFileSync(path.join(process.argv[2], name), "utf8")).join("\n");
if (jobs.change) {
  if (script.split(jobs.change[0]).length !== 2) throw new Error(`${jobs.change[0]} does not stand there once`);
  script = script.replace(jobs.change[0], () => jobs.change[1]);
}
const { epsilonOf, Ledger, judge, readCertificate, Refused, parseJson, signedText, Token, Sha256, words } = new Function("crypto",
  `${script}; return { epsilonOf, Ledger, judge, readCertificate, Refused, parseJson, signedText, Token, Sha256, words };`)(
  jobs.withoutCrypto ? {} : webcrypto);

async function judged(folder) {
  const open = async (name) => Object.defineProperty(await fs.openAsBlob(path.join(folder, name)), "name", { value: name });
  try {
    const names = fs.readdirSync(folder), certificate = path.join(folder, "certificate.json");
    const ledger = await new Ledger().read(await open("ledger.jsonl"));
    const files = await Promise.all(names.filter((name) => /^weights.json$|safetensors$/.test(name)).map(open));
    const read = names.includes("certificate.json") ? readCertificate(fs.readFileSync(certificate, "utf8")) : {};
    const found = await judge({ ledger, ...read, files });
    if (!Array.isArray(found.curve ?? [])) throw new Error("the page cannot draw such a curve");
    return found.map(({ state, text, decisive }) => `${state}${state === "open" && decisive ? ", decisive" : ""}: ${text}`);
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    return [`refused: ${error.message}`];
  }
}

(async () => {
  const plans = (jobs.plans ?? []).map(({ events, delta, neighbours }) => epsilonOf(events, delta, neighbours ?? "record"));
  const runs = [];
  for (const folder of jobs.runs ?? []) runs.push(await judged(folder));
  const texts = (jobs.texts ?? []).map((text) => {
    const bytes = new TextEncoder().encode(text);
    return [signedText(parseJson(text, { number: (digits) => new Token(digits) })), new Sha256().update(bytes.subarray(0, 70)).update(bytes.subarray(70)).hex()];
  });
  console.log(JSON.stringify({ plans, runs, texts, units: (jobs.units ?? []).map((each) => words(each)) }));
})();

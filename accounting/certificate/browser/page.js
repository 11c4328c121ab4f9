"use strict";
// The page: files are dropped, findings are listed, the curve is drawn. Nothing is sent anywhere.

const at = (id) => document.getElementById(id);
const LARGEST_FILE = { "ledger.jsonl": Infinity, "certificate.json": LARGEST_JSON, "weights.json": 2 ** 28 };

function told(state, verdict, findings = []) {
  at("verdict").className = state;
  at("verdict").textContent = verdict;
  at("findings").replaceChildren(...findings.map((each) => {
    const line = document.createElement("li");
    line.className = each.state;
    line.textContent = `${{ holds: "holds", fails: "DOES NOT HOLD", open: "not checked" }[each.state]}: ${each.text}`;
    return line;
  }));
}

async function check(files) {
  at("curve").replaceChildren();
  try {
    const named = (name) => files.find((file) => file.name === name) ?? (name.endsWith(".json") ? undefined : files.find((file) => file.name.endsWith(name.slice(-6))));
    for (const file of files) {
      const most = LARGEST_FILE[file.name] ?? Infinity;
      if (file.size > most) throw new Refused(`${file.name} is larger than ${most / 2 ** 20} MiB, and none of this project is`);
    }
    const log = named("ledger.jsonl"), beside = named("certificate.json"), embedded = at("certificate");
    if (!log) throw new Refused("there is no ledger.jsonl among the dropped files; drop the run's ledger");
    const ledger = new Ledger();
    try {
      await ledger.read(log, (share) => told("open", `reading the ledger: ${Math.round(100 * share)} %`));
    } catch (error) { throw error instanceof Refused ? new Refused(`${log.name}: ${error.message}`) : error; }
    let certificate = {};
    try {
      if (beside) certificate = readCertificate(await beside.text());
      else if (embedded) certificate = readCertificate(embedded.textContent);
    } catch (error) { throw error instanceof Refused ? new Refused(`the certificate ${error.message}`) : error; }
    told("open", "computing ε anew, which may take a minute");
    await new Promise((go) => setTimeout(go, 30));
    const findings = await judge({ ledger, ...certificate, files });
    const count = (state) => findings.filter((each) => each.state === state).length, wrong = findings.find((each) => each.state === "fails");
    const lacking = findings.find((each) => each.state === "open" && each.decisive);
    if (wrong) told("fails", `This does not hold. ${wrong.text}`, findings);
    else if (certificate.certificate?.claim.private !== true) told("open", "Nothing is claimed here.", findings);
    else if (lacking) told("open", `What could be checked holds, but that is not all that the claim needs. Not checked: ${lacking.text}`, findings);
    else told("holds", `What this page could check holds: ${certificate.certificate.claim.statement}. Not checked: ${count("open")}, below.`, findings);
    if (findings.curve && certificate.certificate?.claim.private === true) draw(findings.curve);
  } catch (error) {
    told("fails", error instanceof Refused ? `This cannot be checked: ${error.message}.` : `This cannot be checked: the files are not what this page expects (${error.message}).`);
  }
}

function draw(curve) {
  const wide = 560, high = 260, left = 60, x = (alpha) => left + (wide * (Math.log10(alpha) + 6)) / 6, y = (power) => 10 + high * (1 - power);
  const path = (pairs, style) => `<path d="M${pairs.map(([a, p]) => `${x(a).toFixed(1)} ${y(p).toFixed(1)}`).join("L")}" fill="none" stroke="${style}"/>`;
  const ticks = [1e-6, 1e-4, 1e-2, 1].map((a) => `<text x="${x(a)}" y="${high + 28}" text-anchor="middle">${a}</text>`).join("")
    + [0, 0.5, 1].map((p) => `<text x="${left - 8}" y="${y(p) + 4}" text-anchor="end">${p}</text>`).join("");
  const guessing = [...Array(61).keys()].map((k) => 10 ** (-6 + k / 10)).map((a) => [a, a]);
  at("curve").innerHTML = `<svg viewBox="0 0 640 320" font-size="13" stroke-width="2">${path(guessing, "#9aa7b5")}${path(curve, "#2563a8")}${ticks}
<text x="${left + wide / 2}" y="${high + 50}" text-anchor="middle">false alarms of a test for one record (grey: guessing)</text>
<text x="16" y="${high / 2 + 10}" text-anchor="middle" transform="rotate(-90 16 ${high / 2 + 10})">members found, at most</text></svg>`;
}

for (const kind of ["dragenter", "dragover"]) addEventListener(kind, (event) => { event.preventDefault(); at("drop").className = "over"; });
addEventListener("dragleave", () => { at("drop").className = ""; });
addEventListener("drop", (event) => { event.preventDefault(); at("drop").className = ""; check([...event.dataTransfer.files]); });
at("files").addEventListener("change", (event) => check([...event.target.files]));

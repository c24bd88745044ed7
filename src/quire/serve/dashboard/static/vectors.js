// For models that give vectors, classes or scores: how alike two texts are, and documents ranked by a query.

import { post } from "./api.js";
import { $, el } from "./dom.js";
import { trouble } from "./turns.js";

const lines = (text) => text.split("\n").map((line) => line.trim()).filter(Boolean);

function bars(rows) {
  const most = Math.max(...rows.map(([, value]) => Math.abs(value)), 1e-9);
  return el("ol", { className: "ranks" }, rows.map(([text, value]) => el("li", {}, el("span", { dir: "auto" }, text), el("meter", { min: 0, max: 1, value: Math.max(0, value / most), "aria-hidden": "true" }), el("b", {}, value.toFixed(4)))));
}

const cosine = (a, b) => a.reduce((sum, x, i) => sum + x * b[i], 0) / Math.sqrt(a.reduce((s, x) => s + x * x, 0) * b.reduce((s, x) => s + x * x, 0));

/** What the served model can do decides which request is sent. */
async function compute(page, query, texts) {
  if (page.about.scores) {
    const found = await post("rerank", { model: page.model, query, documents: texts });
    return found.results.map((r) => [texts[r.index], r.relevance_score]);
  }
  const { data } = await post("v1/embeddings", { model: page.model, input: [query, ...texts], encoding_format: "float" });
  const [first, ...others] = data.map((entry) => entry.embedding);
  return others.map((vector, i) => [texts[i], cosine(first, vector)]).sort((a, b) => b[1] - a[1]);
}

async function classify(page, texts) {
  const { data } = await post("classify", { model: page.model, input: texts });
  return data.map((entry, i) => [`${texts[i]} → ${entry.label}`, Math.max(...entry.probs)]);
}

/** `page` has `about` and `model`. */
export function startVectors(page) {
  const classes = page.about.labels?.length > 1 && page.about.scores;
  $("vectors-query").parentElement.hidden = Boolean(classes);
  $("vectors-title").textContent = classes ? "Classes" : page.about.scores ? "Rank documents" : "Similarity";
  $("vectors-call").textContent = page.about.call ?? "";
  $("vectors-form").onsubmit = async (event) => {
    event.preventDefault();
    const texts = lines($("vectors-texts").value);
    const query = $("vectors-query").value.trim();
    if (!texts.length || (!query && !classes)) return;
    const output = $("vectors-output");
    $("vectors-send").disabled = true;
    try {
      output.replaceChildren(bars(classes ? await classify(page, texts) : await compute(page, query, texts)));
    } catch (error) {
      output.replaceChildren(trouble(error.message));
    } finally {
      $("vectors-send").disabled = false;
    }
  };
}

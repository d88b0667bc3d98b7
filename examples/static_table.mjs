// A table of `scalingnote distill --student static` in plain JavaScript: a browser, node, an edge function.
//   import { loadTable } from "./static_table.mjs";
//   const table = await loadTable(async (name) => (await fetch(`/my-model/${name}`)).arrayBuffer());
//   const vector = table.encode("how to parse a date");        // Float32Array of length 1
// `read(name)` returns the bytes of a file of the published folder. Tokenizers: WordPiece of BERT's family.

const text = (bytes) => new TextDecoder().decode(bytes);

export async function loadTable(read) {
  const json = async (name) => JSON.parse(text(await read(name)));
  const [first, dense] = await queryModules(json);
  const tokenizer = wordPiece(await json(`${first}/tokenizer.json`));
  const rows = tensors(await read(`${first}/model.safetensors`))["embedding.weight"];
  const layer = dense ? tensors(await read(`${dense}/model.safetensors`)) : null;
  const dim = rows.shape[1];
  const encode = (query) => {
    const ids = tokenizer(query);
    let vector = new Float32Array(dim);
    for (const id of ids) for (let i = 0; i < dim; i++) vector[i] += rows.data[id * dim + i] / ids.length;
    if (layer) vector = linear(vector, layer["linear.weight"], layer["linear.bias"]);
    const length = Math.hypot(...vector) || 1;
    return vector.map((value) => value / length);
  };
  return { dim, encode, tokenize: tokenizer };
}

// Folders of the StaticEmbedding and the Dense module of queries: of a Router, or of modules.json.
async function queryModules(json) {
  const routed = await json("router_config.json").then((router) => router.structure.query, () => null);
  const modules = routed ?? (await json("modules.json")).map((module) => module.path);
  const named = (kind) => modules.find((folder) => folder.includes(kind));
  if (!named("StaticEmbedding")) throw new Error(`queries pass ${modules}, not only a table of tokens: distil with --student static`);
  return [named("StaticEmbedding"), named("Dense")];
}

const linear = (vector, { shape: [out, size], data }, bias) =>
  Float32Array.from({ length: out }, (_, row) =>
    vector.reduce((sum, value, i) => sum + data[row * size + i] * value, bias ? bias.data[row] : 0));

// Tensors of a safetensors file: only float32, the format of the folder.
function tensors(buffer) {
  const start = 8 + Number(new DataView(buffer).getBigUint64(0, true));
  const header = JSON.parse(text(buffer.slice(8, start)));
  const entries = Object.entries(header).filter(([name]) => name !== "__metadata__");
  return Object.fromEntries(entries.map(([name, { dtype, shape, data_offsets: [from, to] }]) => {
    if (dtype !== "F32") throw new Error(`${name} is ${dtype}, not F32`);
    return [name, { shape, data: new Float32Array(buffer.slice(start + from, start + to)) }];
  }));
}

const CHINESE = /[\u4e00-\u9fff\u3400-\u4dbf\u{20000}-\u{2a6df}\u{2a700}-\u{2b73f}\u{2b740}-\u{2b81f}\u{2b920}-\u{2ceaf}\uf900-\ufaff\u{2f800}-\u{2fa1f}]/gu;
const PUNCTUATION = /[!-/:-@[-`{-~]|\p{P}/gu;
const CONTROL = /[^\P{C}\t\n\r]|\ufffd/gu;
const [ENDS_A_WORD, BEGINS_A_WORD] = [/[\p{L}\p{M}\p{N}\p{Pc}]$/u, /^[\p{L}\p{M}\p{N}\p{Pc}]/u];

function wordPiece(settings) {
  const { model, normalizer, pre_tokenizer: words, added_tokens: added, truncation } = settings;
  if (model.type !== "WordPiece" || normalizer?.type !== "BertNormalizer" || words?.type !== "BertPreTokenizer") {
    throw new Error(`a tokenizer of ${model.type}: this file reads WordPiece of BERT's family`);
  }
  const asWritten = addedTokens(added.filter((token) => !token.normalized), (content) => content);
  const inNormal = addedTokens(added.filter((token) => token.normalized), (content) => normalize(content, normalizer));
  return (query) => {
    const ids = [];
    const add = (id) => ids.push(id);
    const addPieces = (part) => splitWords(part).forEach((word) => ids.push(...pieces(word, model)));
    asWritten(query, add, (part) => inNormal(normalize(part, normalizer), add, addPieces));
    return ids.slice(0, truncation?.max_length ?? Infinity);
  };
}

// Calls `onToken` with the added tokens of a text (the longest from the left), `onText` with the texts between.
// A token that must be a separate word, but is not, stays text, and no other token begins inside it.
function addedTokens(tokens, form) {
  const known = new Map(tokens.map((token) => [form(token.content), token]));
  const longest = Math.max(0, ...[...known.keys()].map((content) => content.length));
  const begins = new Set([...known.keys()].map((content) => content.slice(0, 2)));
  const isAlone = (text, start, end) => !ENDS_A_WORD.test(text.slice(0, start)) && !BEGINS_A_WORD.test(text.slice(end));
  return (text, onToken, onText) => {
    let done = 0;
    for (let at = 0; at < text.length; at++) {
      let end = begins.has(text.slice(at, at + 2)) ? Math.min(at + longest, text.length) : at;
      while (end > at && !known.has(text.slice(at, end))) end--;
      if (end === at) continue;
      const token = known.get(text.slice(at, end));
      if (!token.single_word || isAlone(text, at, end)) {
        onText(text.slice(done, at));
        onToken(token.id);
        done = end;
      }
      at = end - 1;
    }
    onText(text.slice(done));
  };
}

function normalize(query, { clean_text: clean, handle_chinese_chars: chinese, strip_accents: strip, lowercase }) {
  let normal = clean ? query.replace(CONTROL, "").replace(/\p{White_Space}/gu, " ") : query;
  if (chinese) normal = normal.replace(CHINESE, " $& ");
  if (strip ?? lowercase) normal = normal.normalize("NFD").replace(/\p{Mn}/gu, "");
  // Character by character: a final sigma stays a sigma.
  return lowercase ? [...normal].map((c) => c.toLowerCase()).join("") : normal;
}

const splitWords = (normal) => normal.replace(PUNCTUATION, " $& ").split(/\p{White_Space}+/u).filter((word) => word);

function pieces(word, { vocab, unk_token: unknown, continuing_subword_prefix: prefix, max_input_chars_per_word: most }) {
  const characters = [...word];
  if (characters.length > most) return [vocab[unknown]];
  const ids = [];
  for (let start = 0; start < characters.length; ) {
    let end = characters.length;
    const piece = () => (start ? prefix : "") + characters.slice(start, end).join("");
    while (end > start && !Object.hasOwn(vocab, piece())) end--;
    if (end === start) return [vocab[unknown]];
    ids.push(vocab[piece()]);
    start = end;
  }
  return ids;
}

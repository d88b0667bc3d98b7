// A `static` table of `scalingnote distill --student static` in plain JavaScript: a browser, node, an edge function.
//
//   import { loadTable } from "./static_table.mjs";
//   const table = await loadTable(async (name) => (await fetch(`/my-model/${name}`)).arrayBuffer());
//   const vector = table.encode("how to parse a date");        // Float32Array of length 1
//
// `read(name)` gives the bytes of a file of the published folder. Tokenizers: WordPiece of BERT's family.

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
  const folders = await json("router_config.json").then((router) => router.structure.query, () => null);
  const modules = folders ?? (await json("modules.json")).map((module) => module.path);
  const named = (kind) => modules.find((folder) => folder.includes(kind));
  if (!named("StaticEmbedding")) throw new Error(`queries pass ${modules}: distil with --student static`);
  return [named("StaticEmbedding"), named("Dense")];
}

function linear(vector, weight, bias) {
  const [out, size] = weight.shape;
  return Float32Array.from({ length: out }, (_, row) => {
    let sum = bias ? bias.data[row] : 0;
    for (let i = 0; i < size; i++) sum += weight.data[row * size + i] * vector[i];
    return sum;
  });
}

// Tensors of a safetensors file: float32 only, which the folder has.
function tensors(buffer) {
  const start = 8 + Number(new DataView(buffer).getBigUint64(0, true));
  const header = JSON.parse(text(buffer.slice(8, start)));
  const entries = Object.entries(header).filter(([name]) => name !== "__metadata__");
  return Object.fromEntries(entries.map(([name, { dtype, shape, data_offsets: [from, to] }]) => {
    if (dtype !== "F32") throw new Error(`${name} is ${dtype}, not F32`);
    return [name, { shape, data: new Float32Array(buffer.slice(start + from, start + to)) }];
  }));
}

const CHINESE = /[\u4e00-\u9fff\u3400-\u4dbf\u{20000}-\u{2a6df}\u{2a700}-\u{2b73f}\u{2b740}-\u{2b81f}\u{2b920}-\u{2ceaf}\uf900-\ufaff\u{2f800}-\u{2fa1f}]/u;
const PUNCTUATION = /[!-/:-@[-`{-~]|\p{P}/u;
const SPACE = /^\p{White_Space}$/u;

function wordPiece(settings) {
  const { model, normalizer, pre_tokenizer: words, added_tokens: added, truncation } = settings;
  if (model.type !== "WordPiece" || normalizer?.type !== "BertNormalizer" || words?.type !== "BertPreTokenizer") {
    throw new Error(`a tokenizer of ${model.type}: this file reads WordPiece of BERT's family`);
  }
  const special = new Map(added.map((token) => [token.content, token.id]));
  const escaped = [...special.keys()].map((token) => token.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"));
  const split = escaped.length ? new RegExp(`(${escaped.join("|")})`) : null;
  const limit = truncation?.max_length ?? Infinity;
  return (query) => {
    const ids = [];
    for (const part of split ? query.split(split) : [query]) {
      if (special.has(part)) ids.push(special.get(part));
      else for (const word of split_words(normalize(part, normalizer))) ids.push(...pieces(word, model));
    }
    return ids.slice(0, limit);
  };
}

function normalize(query, { clean_text: clean, handle_chinese_chars: chinese, strip_accents: strip, lowercase }) {
  let characters = [...query];
  if (clean) {
    characters = characters
      .filter((c) => "\t\n\r".includes(c) || (c !== "\ufffd" && !/\p{C}/u.test(c)))
      .map((c) => (SPACE.test(c) ? " " : c));
  }
  if (chinese) characters = characters.map((c) => (CHINESE.test(c) ? ` ${c} ` : c));
  let normal = characters.join("");
  if (strip ?? lowercase) normal = normal.normalize("NFD").replace(/\p{Mn}/gu, "");
  // Character by character: a final sigma stays a sigma.
  return lowercase ? [...normal].map((c) => c.toLowerCase()).join("") : normal;
}

function split_words(normal) {
  const spaced = [...normal].map((c) => (PUNCTUATION.test(c) ? ` ${c} ` : c)).join("");
  return spaced.split(/\p{White_Space}+/u).filter((word) => word);
}

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

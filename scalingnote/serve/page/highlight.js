// Marks the words of a query in a text: whatever their case, accents and width, and in scripts without spaces.

const UNSPACED = "\\p{Script=Han}\\p{Script=Hiragana}\\p{Script=Katakana}\\p{Script=Hangul}ー";
const RUNS = new RegExp(`(?<run>[${UNSPACED}]+)|(?:(?![${UNSPACED}])[\\p{L}\\p{N}])+`, "gu");
// They stand in every text, and marking them says nothing.
const FUNCTION_WORDS = new Set(
  ("a an and are as at be by can do does for from has have how i in is it my of on or that the this to was what when where " +
   "which who why will with you your").split(" "));
const STEM = 4;  // letters that forms of a word share at least
const ENDING = 3;  // letters in which they may differ

/** A function from text to a DocumentFragment in which the query's words are <mark>ed. */
export function highlighter(query) {
  const {words, grams} = parse(query);
  return text => {
    const {folded, origins} = fold(text);
    const fragment = document.createDocumentFragment();
    let done = 0;
    for (const [start, end] of merged([...wordRanges(folded, words), ...gramRanges(folded, grams)])) {
      const from = origins[start], to = origins[end];
      const mark = document.createElement("mark");
      mark.textContent = text.slice(from, to);
      fragment.append(text.slice(done, from), mark);
      done = to;
    }
    fragment.append(text.slice(done));
    return fragment;
  };
}

/** Words to look for, and pairs of characters (one alone, if a run has no more) of scripts without spaces. */
function parse(query) {
  const words = [], grams = new Set();
  for (const match of fold(query).folded.matchAll(RUNS)) {
    const run = [...match[0]];
    if (!match.groups.run) words.push(match[0]);
    else if (run.length === 1) grams.add(match[0]);
    else for (let at = 0; at + 1 < run.length; at++) grams.add(run[at] + run[at + 1]);
  }
  const telling = words.filter(word => !FUNCTION_WORDS.has(word));
  return {words: telling.length || grams.size ? telling : words, grams};
}

/** Case and accents folded; `origins[i]` is where the i-th folded code unit came from, with the end at the end. */
function fold(text) {
  let folded = "", at = 0;
  const origins = [];
  for (const character of text) {
    // Upper, then lower: ß becomes ss, and a final sigma a sigma.
    const plain = character.toUpperCase().toLowerCase().normalize("NFKD").replace(/[\u0300-\u036f]/g, "").normalize("NFC");
    for (let i = 0; i < plain.length; i++) origins.push(at);
    folded += plain;
    at += character.length;
  }
  origins.push(at);
  return {folded, origins};
}

function* wordRanges(folded, words) {
  if (!words.length) return;
  for (const match of folded.matchAll(RUNS)) {
    if (match.groups.run) continue;
    if (words.some(word => sameWord(word, match[0]))) yield [match.index, match.index + match[0].length];
  }
}

/** Whether two words are one, or forms of one: attack, attacks. */
function sameWord(one, other) {
  if (one === other) return true;
  const [short, long] = one.length < other.length ? [one, other] : [other, one];
  return short.length >= STEM && long.length - short.length <= ENDING && long.startsWith(short);
}

function* gramRanges(folded, grams) {
  for (const gram of grams) {
    for (let at = folded.indexOf(gram); at >= 0; at = folded.indexOf(gram, at + 1)) yield [at, at + gram.length];
  }
}

function merged(ranges) {
  const joined = [];
  for (const [start, end] of ranges.sort((a, b) => a[0] - b[0])) {
    const last = joined.at(-1);
    if (last && start <= last[1]) last[1] = Math.max(last[1], end);
    else joined.push([start, end]);
  }
  return joined;
}

// Highlighting of the words of a query in a text, whatever their case, accents and width. In every script, words are
// those of scalingnote/core/words.py: letters and digits with their marks; scripts without spaces are cut into pairs of
// letters.

const SCRIPTS = ["Han", "Hiragana", "Katakana", "Thai", "Lao", "Myanmar", "Khmer", "Hangul"];
const UNSPACED = `(?!\\p{Nd})[${SCRIPTS.map(name => `\\p{Script=${name}}`).join("")}ー]`;
const RUNS = new RegExp(`(?<run>(?:${UNSPACED}\\p{M}*)+)|(?:(?!${UNSPACED})[\\p{L}\\p{N}]\\p{M}*)+`, "gu");
const LETTERS = /.\p{M}*/gsu;
// A piece is normalised separately: a letter, and all characters that may compose with it.
const PIECES = /.[\p{M}\p{Cf}\p{DI}\u0640\u1160-\u11ff\u3131-\u318e\uff9e-\uffdc]*/gsu;
// Invisible characters, points of Hebrew, harakat and tatweel of Arabic, accents of Latin, Greek and Cyrillic.
const DROPPED = new RegExp("[\\p{Cf}\\p{DI}\\u0591-\\u05bd\\u05bf\\u05c1\\u05c2\\u05c4\\u05c5\\u05c7\\u0610-\\u061a\\u0640" +
  "\\u064b-\\u0652\\u0670\\u06d6-\\u06dc\\u06df-\\u06e4\\u06e7\\u06e8\\u06ea-\\u06ed\\u08d3-\\u08ff\\u0300-\\u036f]", "gu");
// They are in every text, so marking them does not help.
const FUNCTION_WORDS = new Set(
  ("a an and are as at be by can do does for from has have how i in is it my of on or that the this to was what when where " +
   "which who why will with you your").split(" "));
const STEM = 4;  // smallest number of letters that two forms of a word share
const ENDING = 3;  // largest number of letters in which they differ

/** Return a function from text to a DocumentFragment in which the query's words are <mark>ed. */
export function highlighter(query) {
  const {words, pairs} = parse(query);
  return text => {
    const {folded, origins} = fold(text);
    const fragment = document.createDocumentFragment();
    let done = 0;
    for (const [start, end] of ranges(folded, words, pairs)) {
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

/** Return the words of a query, and pairs of letters (or the only letter of a run) of scripts without spaces. */
function parse(query) {
  const words = [], pairs = new Set();
  for (const match of fold(query).folded.matchAll(RUNS)) {
    const letters = match[0].match(LETTERS);
    if (!match.groups.run) words.push(match[0]);
    else if (letters.length === 1) pairs.add(match[0]);
    else for (let at = 0; at + 1 < letters.length; at++) pairs.add(letters[at] + letters[at + 1]);
  }
  const telling = words.filter(word => !FUNCTION_WORDS.has(word));
  return {words: telling.length || pairs.size ? telling : words, pairs};
}

/** Fold text for comparison; `origins[i]` is the place of the i-th folded code unit in it, and the last one its end. */
function fold(text) {
  let folded = "", at = 0;
  const origins = [];
  for (const piece of text.match(PIECES) ?? []) {
    // First upper, then lower case: ß becomes ss, and a final sigma a sigma.
    const plain = piece.toUpperCase().toLowerCase().normalize("NFKD").replace(DROPPED, "").normalize("NFC");
    for (let i = 0; i < plain.length; i++) origins.push(at);
    folded += plain;
    at += piece.length;
  }
  origins.push(at);
  return {folded, origins};
}

/** Yield the places of words and pairs in a folded text, in its order. */
function* ranges(folded, words, pairs) {
  for (const match of folded.matchAll(RUNS)) {
    if (match.groups.run) yield* pairRanges(match[0].match(LETTERS), match.index, pairs);
    else if (words.some(word => sameWord(word, match[0]))) yield [match.index, match.index + match[0].length];
  }
}

/** Yield the marked parts of a run in a script without spaces. */
function* pairRanges(letters, start, pairs) {
  let at = start, from = -1, covered = 0;
  for (let i = 0; i < letters.length; i++) {
    covered = Math.max(covered - 1, pairs.has(letters[i] + letters[i + 1]) ? 2 : pairs.has(letters[i]) ? 1 : 0);
    if (covered && from < 0) from = at;
    if (!covered && from >= 0) { yield [from, at]; from = -1; }
    at += letters[i].length;
  }
  if (from >= 0) yield [from, at];
}

/** Return whether two words are equal, or forms of one word: attack, attacks. */
function sameWord(one, other) {
  if (one === other) return true;
  const [short, long] = one.length < other.length ? [one, other] : [other, one];
  return short.length >= STEM && long.length - short.length <= ENDING && long.startsWith(short);
}

// Letters of Unicode's mathematical alphabets: browsers draw these, and of MathML's `mathvariant` only `normal`.

// Where each alphabet begins: capitals, small letters, digits (0: it has none).
const ALPHABETS = new Map(Object.entries({
  "bold": [0x1d400, 0x1d41a, 0x1d7ce],
  "italic": [0x1d434, 0x1d44e, 0],
  "bold-italic": [0x1d468, 0x1d482, 0x1d7ce],
  "script": [0x1d49c, 0x1d4b6, 0],
  "bold-script": [0x1d4d0, 0x1d4ea, 0],
  "fraktur": [0x1d504, 0x1d51e, 0],
  "bold-fraktur": [0x1d56c, 0x1d586, 0],
  "double-struck": [0x1d538, 0x1d552, 0x1d7d8],
  "sans-serif": [0x1d5a0, 0x1d5ba, 0x1d7e2],
  "bold-sans-serif": [0x1d5d4, 0x1d5ee, 0x1d7ec],
  "sans-serif-bold": [0x1d5d4, 0x1d5ee, 0x1d7ec],
  "sans-serif-italic": [0x1d608, 0x1d622, 0],
  "sans-serif-bold-italic": [0x1d63c, 0x1d656, 0],
  "monospace": [0x1d670, 0x1d68a, 0x1d7f6],
}));
// Letters that Unicode had before it had these alphabets.
const OLDER = new Map([
  ["script", "B:ℬ E:ℰ F:ℱ H:ℋ I:ℐ L:ℒ M:ℳ R:ℛ e:ℯ g:ℊ o:ℴ"],
  ["fraktur", "C:ℭ H:ℌ I:ℑ R:ℜ Z:ℨ"],
  ["double-struck", "C:ℂ H:ℍ N:ℕ P:ℙ Q:ℚ R:ℝ Z:ℤ"],
  ["italic", "h:ℎ"],
].map(([name, letters]) => [name, new Map(letters.split(" ").map((pair) => pair.split(":")))]));
const GREEK = new Map([["bold", 0x1d6a8], ["bold-italic", 0x1d71c]]);
const GREEK_CAPITALS = "ΑΒΓΔΕΖΗΘΙΚΛΜΝΞΟΠΡϴΣΤΥΦΧΨΩ∇";
const GREEK_LETTERS = "αβγδεζηθικλμνξοπρςστυφχψω∂ϵϑϰϕϱϖ";

/** A text in the letters of an alphabet, by its name in MathML; characters that it has not stay. */
export function inAlphabet(text, name) {
  return ALPHABETS.has(name) ? Array.from(text, (char) => letter(char, name)).join("") : text;
}

function letter(char, name) {
  const older = OLDER.get(name)?.get(char);
  if (older) {
    return older;
  }
  const [capitals, small, digits] = ALPHABETS.get(name);
  for (const [pattern, first, from] of [[/[A-Z]/, capitals, "A"], [/[a-z]/, small, "a"], [/[0-9]/, digits, "0"]]) {
    if (first && pattern.test(char)) {
      return String.fromCodePoint(first + char.charCodeAt(0) - from.charCodeAt(0));
    }
  }
  const [greek, place] = [GREEK.get(name), (GREEK_CAPITALS + GREEK_LETTERS).indexOf(char)];
  return greek && place >= 0 ? String.fromCodePoint(greek + place) : char;
}

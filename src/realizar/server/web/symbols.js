// TeX's names of symbols, by what they are in a formula, and letters of other alphabets.

const table = (text) => new Map(text.trim().split(/\s+/).map((pair) => pair.split(":")));

/** Letters and letter-like signs: shown as identifiers, slanted where they are small Greek. */
export const LETTERS = table(`
  alpha:α beta:β gamma:γ delta:δ epsilon:ϵ varepsilon:ε zeta:ζ eta:η theta:θ vartheta:ϑ iota:ι kappa:κ varkappa:ϰ
  lambda:λ mu:μ nu:ν xi:ξ omicron:ο pi:π varpi:ϖ rho:ρ varrho:ϱ sigma:σ varsigma:ς tau:τ upsilon:υ phi:ϕ varphi:φ
  chi:χ psi:ψ omega:ω imath:ı jmath:ȷ ell:ℓ
`);

/** Letters and signs that stand upright. */
export const UPRIGHT = table(`
  Gamma:Γ Delta:Δ Theta:Θ Lambda:Λ Xi:Ξ Pi:Π Sigma:Σ Upsilon:Υ Phi:Φ Psi:Ψ Omega:Ω hbar:ℏ hslash:ℏ wp:℘ Re:ℜ Im:ℑ
  aleph:ℵ beth:ℶ gimel:ℷ infty:∞ partial:∂ nabla:∇ emptyset:∅ varnothing:∅ forall:∀ exists:∃ nexists:∄ neg:¬ lnot:¬
  top:⊤ bot:⊥ angle:∠ measuredangle:∡ triangle:△ square:□ Box:□ blacksquare:■ qed:■ diamondsuit:♢ heartsuit:♡ clubsuit:♣
  spadesuit:♠ flat:♭ natural:♮ sharp:♯ checkmark:✓ degree:° complement:∁ prime:′ backprime:‵ dag:† ddag:‡ S:§ P:¶
  copyright:© pounds:£ euro:€ ldots:… dots:… dotsc:… textellipsis:… cdots:⋯ dotsb:⋯ dotsm:⋯ dotsi:⋯ vdots:⋮ ddots:⋱
  surd:√ therefore:∴ because:∵ mho:℧ eth:ð Finv:Ⅎ bigstar:★ lozenge:◊ %:% $:$ #:# _:_ &:&
`);

/** Operators and relations, which have room around them. */
export const OPERATORS = table(`
  pm:± mp:∓ times:× div:÷ cdot:⋅ ast:∗ star:⋆ circ:∘ bullet:∙ oplus:⊕ ominus:⊖ otimes:⊗ oslash:⊘ odot:⊙ wedge:∧ land:∧
  vee:∨ lor:∨ cap:∩ cup:∪ sqcap:⊓ sqcup:⊔ uplus:⊎ setminus:∖ smallsetminus:∖ amalg:⨿ wr:≀ diamond:⋄ dagger:† ddagger:‡
  bigtriangleup:△ bigtriangledown:▽ triangleleft:◃ triangleright:▹ bigcirc:◯ ltimes:⋉ rtimes:⋊ bowtie:⋈ Join:⋈
  le:≤ leq:≤ leqslant:⩽ ge:≥ geq:≥ geqslant:⩾ lt:< gt:> ll:≪ gg:≫ lll:⋘ ggg:⋙ ne:≠ neq:≠ equiv:≡ sim:∼ simeq:≃
  approx:≈ approxeq:≊ cong:≅ propto:∝ varpropto:∝ asymp:≍ doteq:≐ models:⊨ vDash:⊨ vdash:⊢ dashv:⊣ Vdash:⊩ perp:⊥
  parallel:∥ nparallel:∦ mid:∣ nmid:∤ smile:⌣ frown:⌢ prec:≺ preceq:⪯ succ:≻ succeq:⪰ in:∈ notin:∉ ni:∋ owns:∋
  subset:⊂ supset:⊃ subseteq:⊆ supseteq:⊇ subsetneq:⊊ supsetneq:⊋ nsubseteq:⊈ nsupseteq:⊉ sqsubset:⊏ sqsupset:⊐
  sqsubseteq:⊑ sqsupseteq:⊒ nleq:≰ ngeq:≱ nless:≮ ngtr:≯ coloneqq:≔ coloneq:≔ eqqcolon:≕ triangleq:≜ lesssim:≲
  gtrsim:≳ lessgtr:≶ trianglelefteq:⊴ trianglerighteq:⊵ vartriangle:△ And:& ratio:∶
  to:→ rightarrow:→ leftarrow:← gets:← leftrightarrow:↔ Rightarrow:⇒ Leftarrow:⇐ Leftrightarrow:⇔ implies:⟹
  impliedby:⟸ iff:⟺ longrightarrow:⟶ longleftarrow:⟵ longleftrightarrow:⟷ Longrightarrow:⟹ Longleftarrow:⟸
  Longleftrightarrow:⟺ mapsto:↦ longmapsto:⟼ uparrow:↑ downarrow:↓ updownarrow:↕ Uparrow:⇑ Downarrow:⇓ nearrow:↗
  searrow:↘ swarrow:↙ nwarrow:↖ hookrightarrow:↪ hookleftarrow:↩ rightharpoonup:⇀ rightharpoondown:⇁ leftharpoonup:↼
  leftharpoondown:↽ rightleftharpoons:⇌ leftrightharpoons:⇋ rightleftarrows:⇄ leadsto:⇝ rightsquigarrow:⇝
  twoheadrightarrow:↠ upharpoonright:↾ restriction:↾ nrightarrow:↛ nRightarrow:⇏ circlearrowleft:↺ circlearrowright:↻
  veebar:⊻ barwedge:⊼ boxplus:⊞ boxminus:⊟ boxtimes:⊠ boxdot:⊡ circledast:⊛ divideontimes:⋇ vartriangleleft:⊲
  vartriangleright:⊳ Vert:‖ vert:|
`);

/** Operators with limits above and below. */
export const BIG = table(`
  sum:∑ prod:∏ coprod:∐ bigcup:⋃ bigcap:⋂ bigvee:⋁ bigwedge:⋀ bigoplus:⨁ bigotimes:⨂ bigodot:⨀ biguplus:⨄ bigsqcup:⨆
`);
OPERATORS.set("colon", ":");
export const INTEGRALS = table("int:∫ iint:∬ iiint:∭ oint:∮ oiint:∯ smallint:∫");

export const FENCES = table(`
  langle:⟨ rangle:⟩ lfloor:⌊ rfloor:⌋ lceil:⌈ rceil:⌉ lvert:| rvert:| lVert:‖ rVert:‖ Vert:‖ vert:| {:{ }:} |:‖
  lbrace:{ rbrace:} lbrack:[ rbrack:] ulcorner:⌜ urcorner:⌝ lgroup:⟮ rgroup:⟯ uparrow:↑ downarrow:↓ backslash:\\
`);

export const FUNCTIONS = new Set(
  `sin cos tan cot sec csc sinh cosh tanh coth arcsin arccos arctan arccot arsinh arcosh artanh log ln lg exp deg dim
  hom ker arg sgn tr`.split(/\s+/),
);
/** Functions with their limits below in displayed formulas. */
export const LIMITS = new Map(
  "lim max min sup inf det gcd lcm Pr argmax argmin".split(" ").map((name) => [name, name]),
);
LIMITS.set("limsup", "lim sup").set("liminf", "lim inf").set("injlim", "inj lim").set("projlim", "proj lim");

export const SPACES = table(`
  ,:0.1667em >:0.2222em ;:0.2778em !:-0.1667em quad:1em qquad:2em thinspace:0.1667em medspace:0.2222em
  thickspace:0.2778em negthinspace:-0.1667em enspace:0.5em space:0.3333em nobreakspace:0.3333em
`);
SPACES.set(" ", "0.3333em").set(":", "0.2222em");

/** Marks above (or below) something. */
export const ACCENTS = table(`
  hat:^ widehat:^ bar:¯ overline:¯ vec:→ overrightarrow:→ overleftarrow:← overleftrightarrow:↔ dot:˙ ddot:¨ dddot:⃛
  tilde:~ widetilde:~ check:ˇ widecheck:ˇ breve:˘ acute:´ grave:\` mathring:˚
`);
export const WIDE = new Set("widehat overline overrightarrow overleftarrow overleftrightarrow widetilde".split(" "));

// Where each alphabet of Unicode's mathematical letters begins: capitals, small letters, digits.
const ALPHABETS = {
  mathbf: [0x1d400, 0x1d41a, 0x1d7ce],
  boldsymbol: [0x1d468, 0x1d482, 0x1d7ce],
  mathcal: [0x1d49c, 0x1d4b6, 0],
  mathfrak: [0x1d504, 0x1d51e, 0],
  mathbb: [0x1d538, 0x1d552, 0x1d7d8],
  mathsf: [0x1d5a0, 0x1d5ba, 0x1d7e2],
  mathtt: [0x1d670, 0x1d68a, 0x1d7f6],
};
ALPHABETS.mathscr = ALPHABETS.mathcal;
ALPHABETS.bm = ALPHABETS.pmb = ALPHABETS.boldsymbol;
// Letters that Unicode had before it had these alphabets.
const OLDER = {
  mathcal: table("B:ℬ E:ℰ F:ℱ H:ℋ I:ℐ L:ℒ M:ℳ R:ℛ e:ℯ g:ℊ o:ℴ"),
  mathfrak: table("C:ℭ H:ℌ I:ℑ R:ℜ Z:ℨ"),
  mathbb: table("C:ℂ H:ℍ N:ℕ P:ℙ Q:ℚ R:ℝ Z:ℤ"),
};
OLDER.mathscr = OLDER.mathcal;
const GREEK = "αβγδεζηθικλμνξοπρςστυφχψω";
const GREEK_CAPITALS = "ΑΒΓΔΕΖΗΘΙΚΛΜΝΞΟΠΡ\0ΣΤΥΦΧΨΩ";

export const isAlphabet = (name) => Object.hasOwn(ALPHABETS, name);

/** A character as a letter of an alphabet, or as it is where that has none. */
export function inAlphabet(char, name) {
  const [capitals, small, digits] = ALPHABETS[name];
  const older = OLDER[name]?.get(char);
  if (older) {
    return older;
  }
  const shifted = (first, from) => String.fromCodePoint(first + char.codePointAt(0) - from.codePointAt(0));
  if (/^[A-Z]$/.test(char)) {
    return shifted(capitals, "A");
  }
  if (/^[a-z]$/.test(char)) {
    return shifted(small, "a");
  }
  if (/^[0-9]$/.test(char) && digits) {
    return shifted(digits, "0");
  }
  if (capitals <= 0x1d468 && char !== "\0") {
    const slanted = name === "mathbf" ? 0 : 116; // bold, and bold and slanted Greek
    if (GREEK.includes(char)) {
      return String.fromCodePoint(0x1d6c2 + slanted + GREEK.indexOf(char));
    }
    if (GREEK_CAPITALS.includes(char)) {
      return String.fromCodePoint(0x1d6a8 + slanted + GREEK_CAPITALS.indexOf(char));
    }
  }
  return char;
}

//! A byte-pair encoding model that loads within milliseconds.
//!
//! A word starts as its characters. Of all neighbours that can be merged, the pair with the lowest rank is merged first, and
//! of equal ranks the leftmost, until none is left. All tokens lie in one string with a hash table of entries, so that a
//! vocabulary of 150,000 takes a handful of allocations.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::hash::{BuildHasherDefault, Hasher};

/// A vocabulary and its merges.
pub(super) struct BpeModel {
    vocab: Vocab,
    /// From the ids of both sides to rank and id of the merged token.
    merges: HashMap<(u32, u32), (u32, u32), BuildHasherDefault<PairHasher>>,
    /// Whether a word that is in the vocabulary becomes that token without any merges.
    whole_words: bool,
}

impl BpeModel {
    /// `vocab`: tokens with their ids; `merges`: in the order of their ranks. The error is a merge with a side or
    /// result that is not in the vocabulary.
    pub fn new<'a>(
        vocab: &[(impl AsRef<str>, u32)],
        merges: &'a [(impl AsRef<str>, impl AsRef<str>)],
        whole_words: bool,
    ) -> Result<BpeModel, (&'a str, &'a str)> {
        let vocab = Vocab::new(vocab);
        let mut ranks = HashMap::with_capacity_and_hasher(merges.len(), Default::default());
        let mut merged = String::new();
        for (rank, (left, right)) in merges.iter().enumerate() {
            let (left, right) = (left.as_ref(), right.as_ref());
            merged.clear();
            merged.push_str(left);
            merged.push_str(right);
            let ids = (vocab.id(left), vocab.id(right), vocab.id(&merged));
            let (Some(a), Some(b), Some(id)) = ids else { return Err((left, right)) };
            ranks.insert((a, b), (rank as u32, id));
        }
        Ok(BpeModel { vocab, merges: ranks, whole_words })
    }

    /// Appends the tokens of a word.
    pub fn tokenize(&self, word: &str, ids: &mut Vec<u32>) {
        if let Some(id) = self.id(word).filter(|_| self.whole_words) {
            ids.push(id);
        } else {
            ids.extend(self.merge(word).iter().map(|symbol| symbol.id));
        }
    }

    /// Returns the id of a token.
    pub fn id(&self, token: &str) -> Option<u32> {
        self.vocab.id(token)
    }

    /// Splits a word into symbols. Characters that are not in the vocabulary are left out.
    fn merge(&self, word: &str) -> Vec<Symbol> {
        let mut symbols = Vec::with_capacity(word.len());
        for (start, c) in word.char_indices() {
            let prev = symbols.len().checked_sub(1);
            let next = Some(symbols.len() + 1);
            let id = self.vocab.id(&word[start..start + c.len_utf8()]);
            symbols.extend(id.map(|id| Symbol { id, prev, next, merged: false }));
        }
        if let Some(last) = symbols.last_mut() {
            last.next = None;
        }
        let merge = |symbols: &[Symbol], at: usize, next: usize| {
            let (rank, id) = *self.merges.get(&(symbols[at].id, symbols[next].id))?;
            Some(Reverse((rank, at, id)))
        };
        let mut queue: BinaryHeap<_> =
            (1..symbols.len()).filter_map(|next| merge(&symbols, next - 1, next)).collect();
        while let Some(Reverse((_, at, id))) = queue.pop() {
            // One side may have been merged with something else meanwhile.
            let Some(next) = symbols[at].next.filter(|_| !symbols[at].merged) else { continue };
            if merge(&symbols, at, next).is_none_or(|Reverse((_, _, merged))| merged != id) {
                continue;
            }
            symbols[next].merged = true;
            let following = symbols[next].next;
            (symbols[at].id, symbols[at].next) = (id, following);
            let prev = symbols[at].prev;
            if let Some(next) = following {
                symbols[next].prev = Some(at);
                queue.extend(merge(&symbols, at, next));
            }
            queue.extend(prev.and_then(|prev| merge(&symbols, prev, at)));
        }
        symbols.retain(|symbol| !symbol.merged);
        symbols
    }
}

/// A token of a word, in a linked list.
struct Symbol {
    id: u32,
    prev: Option<usize>,
    next: Option<usize>,
    /// Whether it was merged into its left neighbour.
    merged: bool,
}

/// A hash table from tokens to ids, with open addressing.
struct Vocab {
    /// All tokens, concatenated.
    text: String,
    entries: Vec<VocabEntry>,
    /// Index of an entry plus 1, or 0 for a free slot. A token takes the first free slot from its hash on.
    slots: Vec<u32>,
}

/// A token's bytes in the text, and its id.
struct VocabEntry {
    start: usize,
    end: usize,
    id: u32,
}

impl Vocab {
    /// If a token occurs twice, the last id counts.
    fn new(all: &[(impl AsRef<str>, u32)]) -> Vocab {
        let text = String::with_capacity(all.iter().map(|(token, _)| token.as_ref().len()).sum());
        let slots = vec![0; (2 * all.len() + 1).next_power_of_two()];
        let mut vocab = Vocab { text, entries: Vec::with_capacity(all.len()), slots };
        for (token, id) in all {
            let token = token.as_ref();
            let slot = vocab.slot(token);
            match vocab.slots[slot] {
                0 => {
                    let start = vocab.text.len();
                    vocab.text.push_str(token);
                    vocab.entries.push(VocabEntry { start, end: vocab.text.len(), id: *id });
                    vocab.slots[slot] = vocab.entries.len() as u32;
                }
                number => vocab.entries[number as usize - 1].id = *id,
            }
        }
        vocab
    }

    /// Returns the slot of a token, or the one it would take. A slot is always free: there are twice as many as tokens.
    fn slot(&self, token: &str) -> usize {
        let mask = self.slots.len() - 1;
        let mut slot = hash(token.as_bytes()) as usize & mask;
        loop {
            match self.slots[slot] {
                0 => return slot,
                number if self.text(&self.entries[number as usize - 1]) == token => return slot,
                _ => slot = (slot + 1) & mask,
            }
        }
    }

    fn text(&self, entry: &VocabEntry) -> &str {
        &self.text[entry.start..entry.end]
    }

    fn id(&self, token: &str) -> Option<u32> {
        let number = self.slots[self.slot(token)] as usize;
        number.checked_sub(1).map(|index| self.entries[index].id)
    }
}

/// The golden ratio in 64 bits: odd, without a pattern in its bits.
const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;

fn mix(state: u64, value: u64) -> u64 {
    let product = u128::from(state ^ value) * u128::from(FACTOR);
    (product >> 64) as u64 ^ product as u64
}

fn hash(bytes: &[u8]) -> u64 {
    let (words, rest) = bytes.as_chunks::<8>();
    let state = words.iter().fold(bytes.len() as u64, |state, word| mix(state, u64::from_le_bytes(*word)));
    let mut last = [0; 8];
    last[..rest.len()].copy_from_slice(rest);
    mix(state, u64::from_le_bytes(last))
}

/// A hasher for pairs of ids.
#[derive(Default)]
struct PairHasher(u64);

impl Hasher for PairHasher {
    fn write(&mut self, bytes: &[u8]) {
        self.0 = mix(self.0, hash(bytes));
    }

    fn write_u32(&mut self, id: u32) {
        self.0 = mix(self.0.rotate_left(32), u64::from(id) + 1);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOKENS: [&str; 9] = ["a", "b", "c", "ab", "bc", "abc", "aa", "é", "ca"];

    fn bpe(whole_words: bool) -> BpeModel {
        let vocab: Vec<_> = TOKENS.iter().zip(0..).map(|(token, id)| (*token, id)).collect();
        BpeModel::new(&vocab, &[("b", "c"), ("a", "b"), ("a", "bc"), ("a", "a")], whole_words).unwrap()
    }

    fn tokenize(bpe: &BpeModel, word: &str) -> Vec<&'static str> {
        let mut ids = Vec::new();
        bpe.tokenize(word, &mut ids);
        ids.into_iter().map(|id| TOKENS[id as usize]).collect()
    }

    #[test]
    fn the_lowest_rank_is_merged_first_then_the_leftmost() {
        let bpe = bpe(false);
        assert_eq!(tokenize(&bpe, "ab"), ["ab"]);
        assert_eq!(tokenize(&bpe, "abc"), ["abc"]);
        assert_eq!(tokenize(&bpe, "aabc"), ["a", "abc"]);
        assert_eq!(tokenize(&bpe, "aaa"), ["aa", "a"]);
        assert_eq!(tokenize(&bpe, "aaaab"), ["aa", "a", "ab"]);
        assert_eq!(tokenize(&bpe, "ca"), ["c", "a"]);
    }

    #[test]
    fn a_word_of_the_vocabulary_can_be_one_token_without_a_merge() {
        assert_eq!(tokenize(&bpe(true), "ca"), ["ca"]);
        assert_eq!(tokenize(&bpe(true), "cab"), ["c", "ab"]);
    }

    #[test]
    fn unknown_characters_are_left_out() {
        assert!(tokenize(&bpe(false), "").is_empty());
        assert!(tokenize(&bpe(false), "xyz").is_empty());
        // As the `tokenizers` crate does, which merges across a character that is left out.
        assert_eq!(tokenize(&bpe(false), "éaxb"), ["é", "ab"]);
    }

    #[test]
    fn the_last_id_of_a_repeated_token_counts() {
        let none: [(&str, &str); 0] = [];
        let bpe = BpeModel::new(&[("a", 1), ("b", 2), ("a", 3)], &none, false).unwrap();
        assert_eq!((bpe.id("a"), bpe.id("b"), bpe.id("c")), (Some(3), Some(2), None));
    }

    #[test]
    fn a_merge_without_a_token_is_an_error() {
        assert_eq!(BpeModel::new(&[("a", 1), ("b", 2)], &[("a", "b")], false).err(), Some(("a", "b")));
    }
}

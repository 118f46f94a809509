//! A byte-pair encoding model that loads within milliseconds.
//!
//! A word starts as its characters. Of all neighbours that can be merged, the pair with the lowest rank is merged first, and
//! of equal ranks the leftmost, until none is left. Merges are listed, or follow from the order of the tokens.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::hash::{BuildHasherDefault, Hasher};

use super::vocab::{TokenList, Vocab, hash, mix};

/// A vocabulary and its merges.
pub(super) struct BpeModel {
    vocab: Vocab,
    merges: Merges,
    /// Whether a word that is in the vocabulary becomes that token without any merges.
    whole_words: bool,
}

/// The pairs of tokens that can be merged.
enum Merges {
    /// From the ids of both sides to rank and id of the merged token.
    Listed(HashMap<(u32, u32), (u32, u32), BuildHasherDefault<PairHasher>>),
    /// Any two tokens that together are a token, ranked by the merged token, then the left, then the right one.
    Ranked,
}

/// The rank of a merge; lower ones come first.
type Rank = [u32; 3];

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
        Ok(BpeModel { vocab, merges: Merges::Listed(ranks), whole_words })
    }

    /// A model whose merges follow from the order of its tokens. The first one has the id `first_id`. `None` if a token
    /// occurs twice.
    pub fn ranked(tokens: &TokenList, first_id: u32, whole_words: bool) -> Option<BpeModel> {
        let tokens: Vec<_> = tokens.iter().zip(first_id..).collect();
        let vocab = Vocab::new(&tokens);
        (vocab.len() == tokens.len()).then_some(BpeModel { vocab, merges: Merges::Ranked, whole_words })
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

    /// Returns the token with this id.
    pub fn token(&self, id: u32) -> Option<&str> {
        self.vocab.token(id)
    }

    /// Splits a word into symbols. Characters that are not in the vocabulary are left out.
    fn merge(&self, word: &str) -> Vec<Symbol> {
        let mut symbols = Vec::with_capacity(word.len());
        for (start, c) in word.char_indices() {
            let prev = symbols.len().checked_sub(1);
            let next = Some(symbols.len() + 1);
            let end = start + c.len_utf8();
            let id = self.vocab.id(&word[start..end]);
            symbols.extend(id.map(|id| Symbol { id, start, end, prev, next, merged: false }));
        }
        if let Some(last) = symbols.last_mut() {
            last.next = None;
        }
        let merge = |symbols: &[Symbol], at: usize, next: usize| {
            let (rank, id) = self.rank(word, &symbols[at], &symbols[next])?;
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
            let Symbol { end, next: following, .. } = symbols[next];
            (symbols[at].id, symbols[at].end, symbols[at].next) = (id, end, following);
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

    /// The rank of merging two neighbours of a word and the id of the result; `None` if they can't be merged.
    fn rank(&self, word: &str, left: &Symbol, right: &Symbol) -> Option<(Rank, u32)> {
        match &self.merges {
            Merges::Listed(merges) => {
                let (rank, id) = *merges.get(&(left.id, right.id))?;
                Some(([rank, 0, 0], id))
            }
            // All characters of such a vocabulary are tokens, so nothing is left out between two neighbours.
            Merges::Ranked => {
                let id = self.vocab.id(&word[left.start..right.end])?;
                Some(([id, left.id, right.id], id))
            }
        }
    }
}

/// A token of a word, in a linked list.
struct Symbol {
    id: u32,
    /// Its bytes in the word.
    start: usize,
    end: usize,
    prev: Option<usize>,
    next: Option<usize>,
    /// Whether it was merged into its left neighbour.
    merged: bool,
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
    fn ranked_tokens_merge_by_the_result_then_by_the_sides() {
        let mut list = TokenList::default();
        ["a", "b", "ab", "ba", "aba", "bab"].iter().for_each(|token| list.push(token.chars()));
        let names: Vec<String> = list.iter().map(str::to_owned).collect();
        let bpe = BpeModel::ranked(&list, 100, false).unwrap();
        let tokenize = |word: &str| {
            let mut ids = Vec::new();
            bpe.tokenize(word, &mut ids);
            ids.into_iter().map(|id| names[id as usize - 100].as_str()).collect::<Vec<_>>()
        };
        assert_eq!(tokenize("ab"), ["ab"]);
        assert_eq!(tokenize("bba"), ["b", "ba"]);
        assert_eq!(tokenize("abab"), ["ab", "ab"]);
        assert_eq!(tokenize("abaab"), ["aba", "ab"]);
        list.push("ba".chars());
        assert!(BpeModel::ranked(&list, 100, false).is_none());
    }

    #[test]
    fn a_merge_without_a_token_is_an_error() {
        assert_eq!(BpeModel::new(&[("a", 1), ("b", 2)], &[("a", "b")], false).err(), Some(("a", "b")));
    }
}

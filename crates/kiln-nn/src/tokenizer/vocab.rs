//! The tokens of a vocabulary and their ids, in a handful of allocations.

use std::ops::Range;

/// Tokens as text, one behind the other.
#[derive(Default)]
pub(super) struct TokenList {
    text: String,
    /// Where each token ends in the text.
    ends: Vec<usize>,
}

impl TokenList {
    pub fn with_capacity(tokens: usize, bytes: usize) -> TokenList {
        TokenList { text: String::with_capacity(bytes), ends: Vec::with_capacity(tokens) }
    }

    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Keeps the first `count` tokens.
    pub fn truncate(&mut self, count: usize) {
        self.ends.truncate(count);
        self.text.truncate(self.ends.last().copied().unwrap_or(0));
    }

    /// Appends a token that consists of these characters.
    pub fn push(&mut self, characters: impl IntoIterator<Item = char>) {
        self.text.extend(characters);
        self.ends.push(self.text.len());
    }

    /// Appends the concatenation of two tokens; `None` if one of them is not in the list.
    pub fn push_pair(&mut self, left: usize, right: usize) -> Option<()> {
        let (left, right) = (self.range(left)?, self.range(right)?);
        self.text.extend_from_within(left);
        self.text.extend_from_within(right);
        self.ends.push(self.text.len());
        Some(())
    }

    /// The tokens, in order.
    pub fn iter(&self) -> impl Iterator<Item = &str> {
        (0..self.len()).filter_map(|index| Some(&self.text[self.range(index)?]))
    }

    fn range(&self, index: usize) -> Option<Range<usize>> {
        let end = *self.ends.get(index)?;
        Some(index.checked_sub(1).map_or(0, |before| self.ends[before])..end)
    }
}

/// A hash table from tokens to ids, with open addressing.
pub(super) struct Vocab {
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
    pub fn new(all: &[(impl AsRef<str>, u32)]) -> Vocab {
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

    /// Number of different tokens.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// The token with this id.
    pub fn token(&self, id: u32) -> Option<&str> {
        // Vocabularies are in the order of ids nearly always.
        let likely =
            self.entries.first().and_then(|first| self.entries.get(id.checked_sub(first.id)? as usize));
        let is_it = |entry: &&VocabEntry| entry.id == id;
        let entry = likely.filter(is_it).or_else(|| self.entries.iter().find(is_it))?;
        Some(self.text(entry))
    }

    pub fn id(&self, token: &str) -> Option<u32> {
        let number = self.slots[self.slot(token)] as usize;
        number.checked_sub(1).map(|index| self.entries[index].id)
    }
}

/// The golden ratio in 64 bits: odd, without a pattern in its bits.
const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;

pub(super) fn mix(state: u64, value: u64) -> u64 {
    let product = u128::from(state ^ value) * u128::from(FACTOR);
    (product >> 64) as u64 ^ product as u64
}

pub(super) fn hash(bytes: &[u8]) -> u64 {
    let (words, rest) = bytes.as_chunks::<8>();
    let state = words.iter().fold(bytes.len() as u64, |state, word| mix(state, u64::from_le_bytes(*word)));
    let mut last = [0; 8];
    last[..rest.len()].copy_from_slice(rest);
    mix(state, u64::from_le_bytes(last))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_takes_concatenations_of_its_own_tokens() {
        let mut list = TokenList::default();
        list.push("a".chars());
        list.push("é".chars());
        assert_eq!((list.push_pair(0, 1), list.push_pair(2, 2)), (Some(()), Some(())));
        assert_eq!((list.push_pair(0, 4), list.push_pair(5, 0)), (None, None));
        assert_eq!(list.iter().collect::<Vec<_>>(), ["a", "é", "aé", "aéaé"]);
    }

    #[test]
    fn the_last_id_of_a_repeated_token_counts() {
        let vocab = Vocab::new(&[("a", 1), ("b", 2), ("a", 3)]);
        assert_eq!((vocab.id("a"), vocab.id("b"), vocab.id("c")), (Some(3), Some(2), None));
        assert_eq!(
            (vocab.len(), vocab.token(3), vocab.token(2), vocab.token(1)),
            (2, Some("a"), Some("b"), None)
        );
    }
}

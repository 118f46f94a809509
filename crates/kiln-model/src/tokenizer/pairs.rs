//! A byte-pair model that is ready within milliseconds.
//!
//! A word begins as its characters; of all neighbours that make a name the pair with the lowest rank is put together, the
//! leftmost first, until none is left. The names lie in one text behind a table of places, so that 150,000 of them take a
//! handful of allocations.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::hash::{BuildHasherDefault, Hasher};
use std::path::{Path, PathBuf};

use tokenizers::models::bpe::BpeTrainer;
use tokenizers::{Model, Result, Token};

/// Names and the pairs that make them.
pub(super) struct Pairs {
    names: Names,
    /// By the ids of both sides: rank, and the id of what they make.
    merges: HashMap<(u32, u32), (u32, u32), BuildHasherDefault<Mixed>>,
}

impl Pairs {
    /// From names with their ids, and pairs in the order of their ranks. An error holds a pair that is not made of names, or
    /// makes none.
    pub fn new<'a>(
        names: &[(impl AsRef<str>, u32)],
        merges: &'a [(impl AsRef<str>, impl AsRef<str>)],
    ) -> std::result::Result<Pairs, (&'a str, &'a str)> {
        let names = Names::new(names);
        let mut found = HashMap::with_capacity_and_hasher(merges.len(), Default::default());
        let mut made = String::new();
        for (rank, (left, right)) in merges.iter().enumerate() {
            let (left, right) = (left.as_ref(), right.as_ref());
            made.clear();
            made.push_str(left);
            made.push_str(right);
            let ids = (names.id(left), names.id(right), names.id(&made));
            let (Some(a), Some(b), Some(id)) = ids else { return Err((left, right)) };
            found.insert((a, b), (rank as u32, id));
        }
        Ok(Pairs { names, merges: found })
    }

    /// The id and the bytes of every piece of a word. Characters without a name are left out.
    fn merge(&self, word: &str) -> Vec<Piece> {
        let mut pieces = Vec::with_capacity(word.len());
        for (start, c) in word.char_indices() {
            let end = start + c.len_utf8();
            let before = pieces.len().checked_sub(1);
            let next = Some(pieces.len() + 1);
            pieces.extend(self.names.id(&word[start..end]).map(|id| Piece { id, start, end, before, next }));
        }
        if let Some(last) = pieces.last_mut() {
            last.next = None;
        }
        let merge = |pieces: &[Piece], at: usize, next: usize| {
            let (rank, id) = *self.merges.get(&(pieces[at].id, pieces[next].id))?;
            Some(Reverse((rank, at, id)))
        };
        let mut waiting: BinaryHeap<_> =
            (1..pieces.len()).filter_map(|next| merge(&pieces, next - 1, next)).collect();
        while let Some(Reverse((_, at, id))) = waiting.pop() {
            // One side may have become a part of something else.
            let Some(next) = pieces[at].next.filter(|_| !pieces[at].is_gone()) else { continue };
            if merge(&pieces, at, next).is_none_or(|Reverse((_, _, made))| made != id) {
                continue;
            }
            let right = std::mem::replace(&mut pieces[next], Piece::GONE);
            let piece = &mut pieces[at];
            (piece.id, piece.end, piece.next) = (id, right.end, right.next);
            let before = piece.before;
            if let Some(next) = right.next {
                pieces[next].before = Some(at);
                waiting.extend(merge(&pieces, at, next));
            }
            waiting.extend(before.and_then(|before| merge(&pieces, before, at)));
        }
        pieces.retain(|piece| !piece.is_gone());
        pieces
    }
}

/// A part of a word, between its neighbours.
#[derive(Clone)]
struct Piece {
    id: u32,
    start: usize,
    end: usize,
    before: Option<usize>,
    next: Option<usize>,
}

impl Piece {
    /// In place of one that was added to its left neighbour.
    const GONE: Piece = Piece { id: 0, start: 0, end: 0, before: None, next: None };

    fn is_gone(&self) -> bool {
        self.end == 0
    }
}

impl Model for Pairs {
    type Trainer = BpeTrainer;

    fn tokenize(&self, word: &str) -> Result<Vec<Token>> {
        let token = |piece: &Piece| {
            Token::new(piece.id, word[piece.start..piece.end].to_owned(), (piece.start, piece.end))
        };
        Ok(self.merge(word).iter().map(token).collect())
    }

    fn token_to_id(&self, token: &str) -> Option<u32> {
        self.names.id(token)
    }

    fn id_to_token(&self, id: u32) -> Option<String> {
        let (name, _) = self.names.all().find(|(_, found)| *found == id)?;
        Some(name.to_owned())
    }

    fn get_vocab(&self) -> HashMap<String, u32> {
        self.names.all().map(|(name, id)| (name.to_owned(), id)).collect()
    }

    fn get_vocab_size(&self) -> usize {
        self.names.places.len()
    }

    fn save(&self, _: &Path, _: Option<&str>) -> Result<Vec<PathBuf>> {
        Err("this form of a tokenizer is for reading only".into())
    }

    fn get_trainer(&self) -> BpeTrainer {
        BpeTrainer::default()
    }
}

/// Names by their text.
struct Names {
    text: String,
    places: Vec<Place>,
    /// Slots with the number of a place and one more, or 0; a name is in the first free one from its hash on.
    slots: Vec<u32>,
}

struct Place {
    start: usize,
    end: usize,
    id: u32,
}

impl Names {
    /// Of a name that occurs twice the last id counts.
    fn new(all: &[(impl AsRef<str>, u32)]) -> Names {
        let text = String::with_capacity(all.iter().map(|(name, _)| name.as_ref().len()).sum());
        let slots = vec![0; (2 * all.len() + 1).next_power_of_two()];
        let mut names = Names { text, places: Vec::with_capacity(all.len()), slots };
        for (name, id) in all {
            let name = name.as_ref();
            let slot = names.slot(name);
            match names.slots[slot] {
                0 => {
                    let start = names.text.len();
                    names.text.push_str(name);
                    names.places.push(Place { start, end: names.text.len(), id: *id });
                    names.slots[slot] = names.places.len() as u32;
                }
                number => names.places[number as usize - 1].id = *id,
            }
        }
        names
    }

    /// The slot of a name, or the one it would get. One is always free: there are twice as many as names.
    fn slot(&self, name: &str) -> usize {
        let mask = self.slots.len() - 1;
        let mut slot = hash(name.as_bytes()) as usize & mask;
        loop {
            match self.slots[slot] {
                0 => return slot,
                number if self.text(&self.places[number as usize - 1]) == name => return slot,
                _ => slot = (slot + 1) & mask,
            }
        }
    }

    fn text(&self, place: &Place) -> &str {
        &self.text[place.start..place.end]
    }

    fn id(&self, name: &str) -> Option<u32> {
        let number = self.slots[self.slot(name)] as usize;
        number.checked_sub(1).map(|index| self.places[index].id)
    }

    fn all(&self) -> impl Iterator<Item = (&str, u32)> {
        self.places.iter().map(|place| (self.text(place), place.id))
    }
}

/// An odd number without a pattern in its bits.
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

/// A hash of two ids.
#[derive(Default)]
struct Mixed(u64);

impl Hasher for Mixed {
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

    fn pairs() -> Pairs {
        let names = ["a", "b", "c", "ab", "bc", "abc", "aa", "é"].iter().enumerate();
        let names: Vec<_> = names.map(|(i, name)| (*name, 10 * i as u32)).collect();
        Pairs::new(&names, &[("b", "c"), ("a", "b"), ("a", "bc"), ("a", "a")]).unwrap()
    }

    fn pieces(word: &str) -> Vec<String> {
        pairs().tokenize(word).unwrap().into_iter().map(|token| token.value).collect()
    }

    #[test]
    fn the_lowest_rank_goes_first_and_then_the_leftmost() {
        assert_eq!(pieces("ab"), ["ab"]);
        assert_eq!(pieces("abc"), ["abc"]);
        assert_eq!(pieces("aabc"), ["a", "abc"]);
        assert_eq!(pieces("aaa"), ["aa", "a"]);
        assert_eq!(pieces("aaaab"), ["aa", "a", "ab"]);
    }

    #[test]
    fn characters_without_a_name_are_left_out_and_offsets_are_bytes() {
        assert_eq!(pieces(""), [""; 0]);
        assert_eq!(pieces("xyz"), [""; 0]);
        let tokens = pairs().tokenize("éaxb").unwrap();
        let offsets: Vec<_> = tokens.iter().map(|token| (token.id, token.offsets)).collect();
        // As the crate does, which lets the two sides of what is left out meet.
        assert_eq!(offsets, [(70, (0, 2)), (30, (2, 5))]);
    }

    #[test]
    fn names_are_found_both_ways() {
        let pairs = pairs();
        assert_eq!((pairs.token_to_id("abc"), pairs.id_to_token(50).as_deref()), (Some(50), Some("abc")));
        assert_eq!((pairs.token_to_id("abcd"), pairs.id_to_token(51)), (None, None));
        assert_eq!((pairs.get_vocab_size(), pairs.get_vocab().len()), (8, 8));
    }

    #[test]
    fn of_a_name_that_occurs_twice_the_last_id_counts() {
        let none: [(&str, &str); 0] = [];
        let pairs = Pairs::new(&[("a", 1), ("b", 2), ("a", 3)], &none).unwrap();
        assert_eq!((pairs.token_to_id("a"), pairs.get_vocab_size()), (Some(3), 2));
    }

    #[test]
    fn a_pair_that_makes_no_name_is_told() {
        assert_eq!(Pairs::new(&[("a", 1), ("b", 2)], &[("a", "b")]).err(), Some(("a", "b")));
    }
}

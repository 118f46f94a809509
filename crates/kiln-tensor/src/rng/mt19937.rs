//! The Mersenne Twister, MT19937, seeded as its authors' `init_genrand` does.

const LEN: usize = 624;
const SHIFT: usize = 397;

/// A generator of 32-bit words.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Mt19937 {
    state: Vec<u32>,
    next: usize,
}

impl Mt19937 {
    pub(super) fn new(seed: u32) -> Self {
        let mut state = Vec::with_capacity(LEN);
        let mut word = seed;
        for i in 1..=LEN as u32 {
            state.push(word);
            word = (word ^ (word >> 30)).wrapping_mul(1_812_433_253).wrapping_add(i);
        }
        Self { state, next: LEN }
    }

    pub(super) fn next_u32(&mut self) -> u32 {
        if self.next == LEN {
            self.refill();
        }
        let word = self.state[self.next];
        self.next += 1;
        temper(word)
    }

    /// Fills `out` with the next words, each converted by `f`.
    pub(super) fn fill<T>(&mut self, mut out: &mut [T], f: impl Fn(u32) -> T) {
        while !out.is_empty() {
            if self.next == LEN {
                self.refill();
            }
            let count = out.len().min(LEN - self.next);
            let (chunk, rest) = out.split_at_mut(count);
            let words = &self.state[self.next..self.next + count];
            chunk.iter_mut().zip(words).for_each(|(out, &word)| *out = f(temper(word)));
            self.next += count;
            out = rest;
        }
    }

    /// The next two words, the first in the upper half.
    pub(super) fn next_u64(&mut self) -> u64 {
        let high = u64::from(self.next_u32());
        (high << 32) | u64::from(self.next_u32())
    }

    fn refill(&mut self) {
        let s = &mut self.state;
        // Three loops, so that no index needs a modulo.
        for k in 0..LEN - SHIFT {
            s[k] = s[k + SHIFT] ^ twist(s[k], s[k + 1]);
        }
        for k in LEN - SHIFT..LEN - 1 {
            s[k] = s[k + SHIFT - LEN] ^ twist(s[k], s[k + 1]);
        }
        s[LEN - 1] = s[SHIFT - 1] ^ twist(s[LEN - 1], s[0]);
        self.next = 0;
    }
}

fn twist(word: u32, next: u32) -> u32 {
    let y = (word & 0x8000_0000) | (next & 0x7fff_ffff);
    (y >> 1) ^ (0x9908_b0df & 0u32.wrapping_sub(y & 1))
}

fn temper(mut y: u32) -> u32 {
    y ^= y >> 11;
    y ^= (y << 7) & 0x9d2c_5680;
    y ^= (y << 15) & 0xefc6_0000;
    y ^ (y >> 18)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ten_thousandth_word_of_the_default_seed_is_the_one_the_cpp_standard_names() {
        let mut mt = Mt19937::new(5489);
        let mut last = 0;
        for _ in 0..10_000 {
            last = mt.next_u32();
        }
        assert_eq!(last, 4_123_659_995);
    }
}

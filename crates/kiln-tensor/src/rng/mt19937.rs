//! The Mersenne Twister, MT19937, seeded as its authors' `init_genrand` does.

const LEN: usize = 624;
const SHIFT: usize = 397;

/// A stream of 32-bit words.
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
        let mut y = self.state[self.next];
        self.next += 1;
        y ^= y >> 11;
        y ^= (y << 7) & 0x9d2c_5680;
        y ^= (y << 15) & 0xefc6_0000;
        y ^ (y >> 18)
    }

    /// Two words, the first one on top.
    pub(super) fn next_u64(&mut self) -> u64 {
        let high = u64::from(self.next_u32());
        (high << 32) | u64::from(self.next_u32())
    }

    fn refill(&mut self) {
        let s = &mut self.state;
        for k in 0..LEN {
            let y = (s[k] & 0x8000_0000) | (s[(k + 1) % LEN] & 0x7fff_ffff);
            let twist = if y & 1 == 1 { 0x9908_b0df } else { 0 };
            s[k] = s[(k + SHIFT) % LEN] ^ (y >> 1) ^ twist;
        }
        self.next = 0;
    }
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

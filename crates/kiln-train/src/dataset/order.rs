//! Which examples a step takes: a function of the seed and the step's number alone, so that a training that is resumed sees
//! the same data as one that never stopped.

use super::entries::Dataset;

/// One example of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Draw {
    /// The entry's index.
    pub entry: usize,
    /// Whether the image and its references are mirrored.
    pub flip: bool,
    /// Whether it is learned without its caption.
    pub drop_caption: bool,
    /// Whether it is learned without its references.
    pub drop_references: bool,
}

/// The order of a dataset. Every pass over the data takes each example once, in an order of its own.
#[derive(Clone, Debug)]
pub struct Order {
    /// Entries by index, each as often as it counts.
    indices: Vec<usize>,
    seed: u64,
    caption_dropout: f32,
    reference_dropout: f32,
    flip: bool,
}

/// What a random number is for.
#[derive(Clone, Copy)]
enum Purpose {
    Shuffle = 1,
    Flip,
    Caption,
    References,
}

impl Order {
    /// Creates the order of a dataset.
    pub fn new(data: &Dataset, seed: u64) -> Order {
        let repeated = |(i, entry): (usize, &super::Entry)| std::iter::repeat_n(i, entry.repeats);
        let options = &data.options;
        Order {
            indices: data.entries.iter().enumerate().flat_map(repeated).collect(),
            seed,
            caption_dropout: options.caption_dropout,
            reference_dropout: options.reference_dropout,
            flip: options.flip,
        }
    }

    /// Returns the examples of a step, counted from 0, that takes `count` of them.
    pub fn step(&self, step: u64, count: usize) -> Vec<Draw> {
        let start = step * count as u64;
        (start..start + count as u64).map(|position| self.draw(position)).collect()
    }

    fn draw(&self, position: u64) -> Draw {
        let length = self.indices.len().max(1) as u64;
        let (epoch, place) = (position / length, (position % length) as usize);
        let chance = |purpose| uniform(self.random(purpose, position));
        Draw {
            entry: self.shuffled(epoch, place),
            flip: self.flip && chance(Purpose::Flip) < 0.5,
            drop_caption: chance(Purpose::Caption) < f64::from(self.caption_dropout),
            drop_references: chance(Purpose::References) < f64::from(self.reference_dropout),
        }
    }

    /// The entry at a place of an epoch, by Fisher and Yates.
    fn shuffled(&self, epoch: u64, place: usize) -> usize {
        let mut indices = self.indices.clone();
        let mut state = self.random(Purpose::Shuffle, epoch);
        for i in (1..indices.len()).rev() {
            state = mix(state);
            indices.swap(i, (state % (i as u64 + 1)) as usize);
            // Places from `i` on are final.
            if i == place {
                break;
            }
        }
        indices[place]
    }

    fn random(&self, purpose: Purpose, index: u64) -> u64 {
        mix(mix(mix(self.seed) ^ purpose as u64) ^ index)
    }
}

/// The finalizer of SplitMix64, which is a bijection with well-mixed bits.
fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// A number in `[0, 1)`.
fn uniform(random: u64) -> f64 {
    (random >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(repeats: &[usize], seed: u64) -> Order {
        let indices = repeats.iter().enumerate().flat_map(|(i, n)| std::iter::repeat_n(i, *n)).collect();
        Order { indices, seed, caption_dropout: 0.25, reference_dropout: 0.0, flip: true }
    }

    fn entries(draws: &[Draw]) -> Vec<usize> {
        draws.iter().map(|draw| draw.entry).collect()
    }

    #[test]
    fn every_epoch_takes_each_example_as_often_as_it_counts_in_another_order() {
        let order = order(&[1, 2, 1, 3], 7);
        let epoch = |number: u64| entries(&order.step(number, 7));
        for number in 0..20 {
            let mut sorted = epoch(number);
            sorted.sort_unstable();
            assert_eq!(sorted, [0, 1, 1, 2, 3, 3, 3]);
        }
        assert!((1..20).any(|number| epoch(number) != epoch(0)));
    }

    #[test]
    fn a_step_depends_on_seed_and_number_alone() {
        let whole: Vec<Draw> = (0..30).flat_map(|step| order(&[1; 5], 3).step(step, 2)).collect();
        assert_eq!(order(&[1; 5], 3).step(29, 2), whole[58..]);
        assert_ne!(entries(&order(&[1; 5], 4).step(0, 60)), entries(&whole));
    }

    #[test]
    fn shares_are_about_those_that_were_asked_for() {
        let draws = order(&[1; 8], 1).step(0, 4000);
        let share = |of: fn(&Draw) -> bool| draws.iter().filter(|draw| of(draw)).count() as f64 / 4000.0;
        assert!((share(|draw| draw.drop_caption) - 0.25).abs() < 0.03);
        assert!((share(|draw| draw.flip) - 0.5).abs() < 0.03);
        assert_eq!(share(|draw| draw.drop_references), 0.0);
    }
}

//! Codes for symbols by how often they occur, none longer than deflate and our bit buffer allow.

/// The longest code. Deflate allows 15; with 13, four codes and the rest of a byte fit into 64 bits.
pub(crate) const LONGEST: usize = 13;

/// How long each symbol's code is; 0 for symbols that don't occur.
pub(crate) fn lengths(counts: &[u32]) -> Vec<u8> {
    let mut symbols: Vec<usize> = (0..counts.len()).filter(|&symbol| counts[symbol] > 0).collect();
    let mut lengths = vec![0; counts.len()];
    if let [only] = symbols[..] {
        lengths[only] = 1;
    }
    if symbols.len() < 2 {
        return lengths;
    }
    // Ties by symbol: the same picture gives the same file.
    symbols.sort_by_key(|&symbol| (counts[symbol], symbol));
    let weights: Vec<u64> = symbols.iter().map(|&symbol| u64::from(counts[symbol])).collect();
    let mut numbers = numbers_of_lengths(&weights);
    shorten(&mut numbers);
    // The rarest get the longest.
    let longest_first = (1..=LONGEST).rev().flat_map(|length| std::iter::repeat_n(length, numbers[length]));
    for (symbol, length) in symbols.into_iter().zip(longest_first) {
        lengths[symbol] = length as u8;
    }
    lengths
}

/// How many codes have each length in Huffman's tree over rising weights, those beyond the longest counted as such.
fn numbers_of_lengths(weights: &[u64]) -> [usize; LONGEST + 1] {
    // Leaves come first, then inner nodes, which are made in the order of their weights: two queues are enough.
    let leaves = weights.len();
    let mut weights = weights.to_vec();
    let mut parents = vec![0; 2 * leaves - 1];
    let (mut leaf, mut node) = (0, leaves);
    for made in leaves..2 * leaves - 1 {
        let mut weight = 0;
        for _ in 0..2 {
            let next = if leaf < leaves && (node >= made || weights[leaf] <= weights[node]) {
                &mut leaf
            } else {
                &mut node
            };
            weight += weights[*next];
            parents[*next] = made;
            *next += 1;
        }
        weights.push(weight);
    }
    let mut depths = vec![0; 2 * leaves - 1];
    let mut numbers = [0; LONGEST + 1];
    for i in (0..2 * leaves - 2).rev() {
        depths[i] = depths[parents[i]] + 1;
        if i < leaves {
            numbers[depths[i].min(LONGEST)] += 1;
        }
    }
    numbers
}

/// Cutting long codes off made too many of them: others grow until they fit, in steps of one place of the longest.
fn shorten(numbers: &mut [usize; LONGEST + 1]) {
    let room = 1 << LONGEST;
    let mut taken: usize = (1..=LONGEST).map(|length| numbers[length] << (LONGEST - length)).sum();
    while taken > room {
        // Two of the longest become a code and its sibling one level below the lowest that can be split.
        let Some(short) = (1..LONGEST).rev().find(|&length| numbers[length] > 0) else { return };
        numbers[LONGEST] -= 1;
        numbers[short] -= 1;
        numbers[short + 1] += 2;
        taken -= 1;
    }
}

/// The code of each symbol, as deflate writes it: lowest bit first.
pub(crate) fn codes(lengths: &[u8]) -> Vec<u16> {
    let mut next = [0u16; LONGEST + 2];
    for length in 1..=LONGEST {
        let number = lengths.iter().filter(|&&l| usize::from(l) == length).count() as u16;
        next[length + 1] = (next[length] + number) << 1;
    }
    let code = |&length: &u8| {
        let place = &mut next[usize::from(length)];
        let code = *place;
        *place += 1;
        if length == 0 { 0 } else { code.reverse_bits() >> (16 - length) }
    };
    lengths.iter().map(code).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The part of all codes that these lengths take, in 2⁻¹³.
    fn taken(lengths: &[u8]) -> usize {
        lengths.iter().filter(|&&l| l > 0).map(|&l| 1 << (LONGEST - usize::from(l))).sum()
    }

    #[test]
    fn what_occurs_more_often_is_shorter() {
        assert_eq!(lengths(&[8, 4, 2, 1, 1]), [1, 2, 3, 4, 4]);
        assert_eq!(lengths(&[0, 5, 0, 5]), [0, 1, 0, 1]);
        assert_eq!(lengths(&[0, 7]), [0, 1]);
        assert_eq!(lengths(&[0, 0]), [0, 0]);
    }

    #[test]
    fn no_code_is_too_long_and_all_are_used_up() {
        // Fibonacci's numbers make the deepest trees.
        let mut counts = vec![1u32, 1];
        while counts.len() < 40 {
            counts.push(counts[counts.len() - 1] + counts[counts.len() - 2]);
        }
        let lengths = lengths(&counts);
        assert_eq!(lengths.iter().copied().max(), Some(LONGEST as u8));
        assert_eq!(taken(&lengths), 1 << LONGEST);
        assert!(lengths.is_sorted_by(|rare, often| rare >= often));
        assert_eq!(taken(&super::lengths(&[3; 286])), 1 << LONGEST);
    }

    #[test]
    fn no_code_begins_with_another() {
        let lengths = lengths(&[90, 1, 0, 30, 7, 7, 2]);
        let codes = codes(&lengths);
        for (i, a) in codes.iter().enumerate().filter(|(i, _)| lengths[*i] > 0) {
            for (j, b) in codes.iter().enumerate().filter(|(j, _)| *j != i && lengths[*j] > 0) {
                let shorter = lengths[i].min(lengths[j]);
                assert_ne!(a & ((1 << shorter) - 1), b & ((1 << shorter) - 1), "{i} {j}");
            }
        }
    }
}

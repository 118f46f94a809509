//! Length-limited Huffman codes for deflate and WebP.

/// Longest code, in bits. Both allow 15; with 13, four codes and an incomplete byte fit into 64 bits.
pub(crate) const MAX_CODE_BITS: usize = 13;

/// Returns the code length of each symbol from its number of occurrences; 0 for symbols that do not occur.
///
/// No code is longer than `max_bits`, at most [`MAX_CODE_BITS`].
pub(crate) fn code_lengths(counts: &[u32], max_bits: usize) -> Vec<u8> {
    let mut symbols: Vec<usize> = (0..counts.len()).filter(|&symbol| counts[symbol] > 0).collect();
    let mut lengths = vec![0; counts.len()];
    if let [only] = symbols[..] {
        lengths[only] = 1;
    }
    if symbols.len() < 2 {
        return lengths;
    }
    // Ties are broken by symbol, so that the same image gives the same file.
    symbols.sort_by_key(|&symbol| (counts[symbol], symbol));
    let weights: Vec<u64> = symbols.iter().map(|&symbol| u64::from(counts[symbol])).collect();
    let mut histogram = length_histogram(&weights, max_bits);
    resolve_overflow(&mut histogram, max_bits);
    // The rarest symbols get the longest codes.
    let longest_first =
        (1..=max_bits).rev().flat_map(|length| std::iter::repeat_n(length, histogram[length]));
    for (symbol, length) in symbols.into_iter().zip(longest_first) {
        lengths[symbol] = length as u8;
    }
    lengths
}

/// Counts the codes of each length in the Huffman tree of ascending `weights`. Longer codes than the limit are cut to it.
fn length_histogram(weights: &[u64], max_bits: usize) -> [usize; MAX_CODE_BITS + 1] {
    // Leaves first, then inner nodes, which are created in ascending order: two queues replace a heap.
    let leaves = weights.len();
    let mut weights = weights.to_vec();
    let mut parents = vec![0; 2 * leaves - 1];
    let (mut leaf, mut inner) = (0, leaves);
    for parent in leaves..2 * leaves - 1 {
        let mut weight = 0;
        for _ in 0..2 {
            let next = if leaf < leaves && (inner >= parent || weights[leaf] <= weights[inner]) {
                &mut leaf
            } else {
                &mut inner
            };
            weight += weights[*next];
            parents[*next] = parent;
            *next += 1;
        }
        weights.push(weight);
    }
    let mut depths = vec![0; 2 * leaves - 1];
    let mut histogram = [0; MAX_CODE_BITS + 1];
    for i in (0..2 * leaves - 2).rev() {
        depths[i] = depths[parents[i]] + 1;
        if i < leaves {
            histogram[depths[i].min(max_bits)] += 1;
        }
    }
    histogram
}

/// Lengthens codes until they fit: after cutting, the codes may take more than the whole code space.
fn resolve_overflow(histogram: &mut [usize; MAX_CODE_BITS + 1], max_bits: usize) {
    // In units of the longest code.
    let space = 1 << max_bits;
    let mut used: usize = (1..=max_bits).map(|length| histogram[length] << (max_bits - length)).sum();
    while used > space {
        // Splits the longest code that can be split, and moves one of the longest codes beside it.
        let Some(short) = (1..max_bits).rev().find(|&length| histogram[length] > 0) else { return };
        histogram[max_bits] -= 1;
        histogram[short] -= 1;
        histogram[short + 1] += 2;
        used -= 1;
    }
}

/// Returns the canonical code of each symbol, bit-reversed as deflate writes it.
pub(crate) fn canonical_codes(lengths: &[u8]) -> Vec<u16> {
    let mut next = [0u16; MAX_CODE_BITS + 2];
    for length in 1..=MAX_CODE_BITS {
        let count = lengths.iter().filter(|&&l| usize::from(l) == length).count() as u16;
        next[length + 1] = (next[length] + count) << 1;
    }
    let code = |&length: &u8| {
        let next = &mut next[usize::from(length)];
        let code = *next;
        *next += 1;
        if length == 0 { 0 } else { code.reverse_bits() >> (16 - length) }
    };
    lengths.iter().map(code).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The part of the code space that these lengths use, in units of 2⁻¹³.
    fn used(lengths: &[u8]) -> usize {
        lengths.iter().filter(|&&l| l > 0).map(|&l| 1 << (MAX_CODE_BITS - usize::from(l))).sum()
    }

    #[test]
    fn frequent_symbols_have_short_codes() {
        assert_eq!(code_lengths(&[8, 4, 2, 1, 1], MAX_CODE_BITS), [1, 2, 3, 4, 4]);
        assert_eq!(code_lengths(&[0, 5, 0, 5], MAX_CODE_BITS), [0, 1, 0, 1]);
        assert_eq!(code_lengths(&[0, 7], MAX_CODE_BITS), [0, 1]);
        assert_eq!(code_lengths(&[0, 0], MAX_CODE_BITS), [0, 0]);
    }

    #[test]
    fn codes_are_limited_in_length_and_fill_the_code_space() {
        // Fibonacci numbers give the deepest trees.
        let mut counts = vec![1u32, 1];
        while counts.len() < 40 {
            counts.push(counts[counts.len() - 1] + counts[counts.len() - 2]);
        }
        let lengths = code_lengths(&counts, MAX_CODE_BITS);
        assert_eq!(lengths.iter().copied().max(), Some(MAX_CODE_BITS as u8));
        assert_eq!(used(&lengths), 1 << MAX_CODE_BITS);
        assert!(lengths.is_sorted_by(|rare, often| rare >= often));
        assert_eq!(used(&code_lengths(&[3; 286], MAX_CODE_BITS)), 1 << MAX_CODE_BITS);
    }

    #[test]
    fn no_code_is_a_prefix_of_another() {
        let lengths = code_lengths(&[90, 1, 0, 30, 7, 7, 2], MAX_CODE_BITS);
        let codes = canonical_codes(&lengths);
        for (i, a) in codes.iter().enumerate().filter(|(i, _)| lengths[*i] > 0) {
            for (j, b) in codes.iter().enumerate().filter(|(j, _)| *j != i && lengths[*j] > 0) {
                let shorter = lengths[i].min(lengths[j]);
                assert_ne!(a & ((1 << shorter) - 1), b & ((1 << shorter) - 1), "{i} {j}");
            }
        }
    }
}

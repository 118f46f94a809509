//! Names similar to a missing one, for error messages.

/// Up to three names that are similar to `wanted`, most similar first.
pub fn similar_names<'n>(wanted: &str, names: impl Iterator<Item = &'n str>) -> Vec<String> {
    // A third of a short name would make anything similar.
    let limit = (wanted.len() / 3).clamp(1, wanted.len() / 4 + 2);
    let mut similar: Vec<(usize, &str)> =
        names.filter_map(|name| Some((distance(wanted, name, limit)?, name))).collect();
    similar.sort();
    similar.into_iter().take(3).map(|(_, name)| name.to_owned()).collect()
}

/// The edit distance between two names, if at most `limit`; two letters that changed places are one edit. A prefix that only one of them has (`model.`,
/// `model.diffusion_model.`) counts as one edit: it is the most common difference.
fn distance(a: &str, b: &str, limit: usize) -> Option<usize> {
    let prefixed = |long: &str, short: &str| long.strip_suffix(short).is_some_and(|p| p.ends_with('.'));
    if prefixed(a, b) || prefixed(b, a) {
        return Some(1);
    }
    // Also bounds the time that a file with very long names costs.
    if a.len().abs_diff(b.len()) > limit {
        return None;
    }
    let (a, b) = (a.as_bytes(), b.as_bytes());
    let (mut before, mut last): (Vec<usize>, Vec<usize>) = (Vec::new(), (0..=b.len()).collect());
    for (i, x) in a.iter().enumerate() {
        let mut row = vec![i + 1];
        for (j, y) in b.iter().enumerate() {
            let mut edits = (last[j] + usize::from(x != y)).min(last[j + 1] + 1).min(row[j] + 1);
            if i > 0 && j > 0 && *x == b[j - 1] && a[i - 1] == *y {
                edits = edits.min(before[j - 1] + 1);
            }
            row.push(edits);
        }
        before = std::mem::replace(&mut last, row);
    }
    Some(last[b.len()]).filter(|&d| d <= limit)
}

/// Formats names for a message: the first eight, and the number of the others.
pub(crate) fn quoted(names: &[String]) -> String {
    const SHOWN: usize = 8;
    let shown: Vec<String> = names.iter().take(SHOWN).map(|n| format!("`{n}`")).collect();
    match names.len().saturating_sub(SHOWN) {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distance_counts_edits() {
        assert_eq!(distance("kitten", "sitting", 9), Some(3));
        assert_eq!(distance("same", "same", 0), Some(0));
        assert_eq!(distance("klien", "klein", 9), Some(1));
        assert_eq!(distance("kitten", "sitting", 2), None);
        assert_eq!(distance("x_embedder.weight", "model.x_embedder.weight", 0), Some(1));
    }

    #[test]
    fn similar_names_come_first_and_others_not_at_all() {
        let names = ["norm_q.weight", "norm_k.weight", "to_out.0.weight", "bn.running_mean"];
        assert_eq!(similar_names("norm_kk.weight", names.into_iter()), ["norm_k.weight", "norm_q.weight"]);
        assert!(similar_names("nope", ["dtype", "model"].into_iter()).is_empty());
        assert!(similar_names("single_blocks.3.linear1.weight", names.into_iter()).is_empty());
    }
}

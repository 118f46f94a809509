//! Names similar to a missing one, for error messages.

/// Up to three names that are similar to `wanted`, most similar first.
pub fn similar_names<'n>(wanted: &str, names: impl Iterator<Item = &'n str>) -> Vec<String> {
    let limit = wanted.len() / 4 + 2;
    let mut similar: Vec<(usize, &str)> =
        names.filter_map(|name| Some((distance(wanted, name, limit)?, name))).collect();
    similar.sort();
    similar.into_iter().take(3).map(|(_, name)| name.to_owned()).collect()
}

/// The edit distance between two names, if at most `limit`. A prefix that only one of them has (`model.`,
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
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.iter().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, y) in b.iter().enumerate() {
            let change = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = change.min(diagonal + 1).min(row[j] + 1);
        }
    }
    Some(row[b.len()]).filter(|&d| d <= limit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distance_counts_edits() {
        assert_eq!(distance("kitten", "sitting", 9), Some(3));
        assert_eq!(distance("same", "same", 0), Some(0));
        assert_eq!(distance("kitten", "sitting", 2), None);
        assert_eq!(distance("x_embedder.weight", "model.x_embedder.weight", 0), Some(1));
    }

    #[test]
    fn similar_names_come_first_and_others_not_at_all() {
        let names = ["norm_q.weight", "norm_k.weight", "to_out.0.weight", "bn.running_mean"];
        assert_eq!(similar_names("norm_kk.weight", names.into_iter()), ["norm_k.weight", "norm_q.weight"]);
        assert!(similar_names("single_blocks.3.linear1.weight", names.into_iter()).is_empty());
    }
}

//! Names that resemble one that is missing, for error messages.

/// The up to three names nearest to `wanted`, best first. Names that have little in common are left out.
pub fn nearest<'n>(wanted: &str, names: impl Iterator<Item = &'n str>) -> Vec<String> {
    let limit = wanted.len() / 4 + 2;
    let mut near: Vec<(usize, &str)> =
        names.filter_map(|name| Some((distance(wanted, name, limit)?, name))).collect();
    near.sort();
    near.into_iter().take(3).map(|(_, name)| name.to_owned()).collect()
}

/// Letters to change, add or drop to get from one name to the other, if at most `limit`. A prefix that only one of
/// them has (`model.`, `model.diffusion_model.`) counts as one: it is the most common difference.
fn distance(a: &str, b: &str, limit: usize) -> Option<usize> {
    let prefixed = |long: &str, short: &str| long.strip_suffix(short).is_some_and(|p| p.ends_with('.'));
    if prefixed(a, b) || prefixed(b, a) {
        return Some(1);
    }
    // Also keeps a file with absurd names from costing time.
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
    fn nearest_names_come_first_and_strangers_not_at_all() {
        let names = ["norm_q.weight", "norm_k.weight", "to_out.0.weight", "bn.running_mean"];
        assert_eq!(nearest("norm_kk.weight", names.into_iter()), ["norm_k.weight", "norm_q.weight"]);
        assert!(nearest("single_blocks.3.linear1.weight", names.into_iter()).is_empty());
    }
}

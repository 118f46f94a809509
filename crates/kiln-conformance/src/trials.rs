use std::sync::Arc;

use kiln_ops::Backend;
use libtest_mimic::Trial;

use crate::{Case, cases};

/// Cases that a backend does not run, and why.
#[derive(Clone, Copy, Debug)]
pub struct Skip {
    /// Part of the names of the cases.
    pub cases: &'static str,
    /// Shown beside each of them.
    pub reason: &'static str,
}

/// A trial for every case, named after it and `name`, such as `swiglu/odd_tails/f32::cpu_avx512`.
///
/// Skipped cases are listed as ignored, with their reason; a skip that fits no case is a failing trial.
pub fn trials<B: Backend + 'static>(name: &str, backend: &Arc<B>, skips: &[Skip]) -> Vec<Trial> {
    let cases = cases::<B>();
    let mut trials: Vec<Trial> = skips
        .iter()
        .filter(|skip| !cases.iter().any(|case| case.name().contains(skip.cases)))
        .map(|skip| {
            let complaint = format!("no case is named like `{}`: remove the skip", skip.cases);
            Trial::test(format!("skips/{}::{name}", skip.cases), move || Err(complaint.into()))
        })
        .collect();
    for case in cases {
        let skip = skips.iter().find(|skip| case.name().contains(skip.cases));
        let backend = Arc::clone(backend);
        let trial = trial(name, case, move |case| case.check(&backend));
        trials.push(match skip {
            Some(skip) => trial.with_ignored_flag(true).with_kind(skip.reason),
            None => trial,
        });
    }
    trials
}

/// A trial for every case, in which the two backends have to give the same bytes: one thread and many, say.
///
/// What is skipped in [`trials`] is left out here.
pub fn bit_identical<B: Backend + 'static>(name: &str, a: &Arc<B>, b: &Arc<B>, skips: &[Skip]) -> Vec<Trial> {
    let skipped = |case: &Case<B>| skips.iter().any(|skip| case.name().contains(skip.cases));
    cases::<B>()
        .into_iter()
        .filter(|case| !skipped(case) && !case.name().starts_with("refusals/"))
        .map(|case| {
            let (a, b) = (Arc::clone(a), Arc::clone(b));
            trial(&format!("bits_{name}"), case, move |case| case.check_bits(&a, &b))
        })
        .collect()
}

fn trial<B: Backend + 'static>(
    name: &str,
    case: Case<B>,
    check: impl FnOnce(&Case<B>) -> Result<(), String> + Send + 'static,
) -> Trial {
    Trial::test(format!("{}::{name}", case.name()), move || check(&case).map_err(Into::into))
}

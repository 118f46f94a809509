//! The cases as libtest trials.

use std::sync::Arc;

use kiln_ops::TrainingBackend;
use libtest_mimic::Trial;

use crate::{Case, cases};

/// Cases that a backend does not run, and why.
#[derive(Clone, Copy, Debug)]
pub struct Skip {
    /// A substring of the cases' names.
    pub cases: &'static str,
    /// Shown beside each case.
    pub reason: &'static str,
}

/// Returns a trial for every case, named after it and the backend's `name`, such as `swiglu/odd_tails/f32::cpu_avx512`.
///
/// Skipped cases are listed as ignored, with their reason. A skip that matches no case is a failing trial.
pub fn trials<B: TrainingBackend + 'static>(name: &str, backend: &Arc<B>, skips: &[Skip]) -> Vec<Trial> {
    let backend = Arc::clone(backend);
    checked(name, cases(), skips, move |case: &Case<B>| case.check(&backend))
}

/// Like [`trials`]; `second` must give the same bytes as `first`, such as one thread and many.
pub fn trials_of_both<B: TrainingBackend + 'static>(
    name: &str,
    first: &Arc<B>,
    second: &Arc<B>,
    skips: &[Skip],
) -> Vec<Trial> {
    let (first, second) = (Arc::clone(first), Arc::clone(second));
    checked(name, cases(), skips, move |case: &Case<B>| case.check_both(&first, &second))
}

fn checked<B: TrainingBackend + 'static>(
    name: &str,
    cases: Vec<Case<B>>,
    skips: &[Skip],
    check: impl Fn(&Case<B>) -> Result<(), String> + Send + Sync + 'static,
) -> Vec<Trial> {
    let check = Arc::new(check);
    let mut trials: Vec<Trial> = skips
        .iter()
        .filter(|skip| !cases.iter().any(|case| case.name().contains(skip.cases)))
        .map(|skip| {
            let error = format!("the skip `{}` matches no case: remove it", skip.cases);
            Trial::test(format!("skips/{}::{name}", skip.cases), move || Err(error.into()))
        })
        .collect();
    for case in cases {
        let skip = skips.iter().find(|skip| case.name().contains(skip.cases));
        let check = Arc::clone(&check);
        let trial = trial(name, case, move |case| check(case));
        trials.push(match skip {
            Some(skip) => trial.with_ignored_flag(true).with_kind(skip.reason),
            None => trial,
        });
    }
    trials
}

/// Returns a trial for every case but those of training, in which the two backends must give the same bytes.
///
/// Leaves out what [`trials`] skips.
pub fn bit_identical<B: TrainingBackend + 'static>(
    name: &str,
    a: &Arc<B>,
    b: &Arc<B>,
    skips: &[Skip],
) -> Vec<Trial> {
    let skipped = |case: &Case<B>| skips.iter().any(|skip| case.name().contains(skip.cases));
    cases::<B>()
        .into_iter()
        .filter(|case| !skipped(case))
        .filter(|case| ["invalid_arguments/", "training/"].iter().all(|kind| !case.name().starts_with(kind)))
        .map(|case| {
            let (a, b) = (Arc::clone(a), Arc::clone(b));
            trial(&format!("bits_{name}"), case, move |case| case.check_bits(&a, &b))
        })
        .collect()
}

fn trial<B: TrainingBackend + 'static>(
    name: &str,
    case: Case<B>,
    check: impl FnOnce(&Case<B>) -> Result<(), String> + Send + 'static,
) -> Trial {
    Trial::test(format!("{}::{name}", case.name()), move || check(&case).map_err(Into::into))
}

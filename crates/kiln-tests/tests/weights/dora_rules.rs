//! What a weight other than 1 means for a DoRA, and stacked LoRAs, against PEFT 0.21.2: the weight of a layer with adapters
//! of rank 2 and alpha 4 in eval mode, after `set_scale`.

use crate::common::flux::{File, Matrix, effective};
use crate::common::layers;
use kiln_weights::{DoraRule, Error, Lora, LoraOptions, LoraProblem, LoraUpdates, WeightSource};

const WEIGHT: [f32; 12] = [0.5, -1.0, 2.0, 1.5, 0.25, -0.75, -0.5, 1.0, 0.5, 2.0, 0.0, 1.0];
const DOWN: [[f32; 6]; 2] = [[0.5, 1.0, -0.5, 0.25, -0.75, 1.5], [1.0, -0.5, 0.5, -1.0, 0.5, 0.25]];
const UP: [[f32; 8]; 2] =
    [[1.0, 0.5, -0.5, 0.25, 0.75, -1.0, 0.0, 0.5], [0.5, -0.5, 1.0, 0.25, -0.25, 0.5, 0.75, 1.0]];
const MAGNITUDES: [[f32; 4]; 2] = [[2.0, 1.5, 3.0, 0.5], [1.0, 2.5, 0.75, 2.0]];

fn matrix(rows: usize, cols: usize, values: &[f32]) -> Matrix {
    Matrix { rows, cols, values: values.to_vec() }
}

fn base() -> WeightSource {
    let mut file = File::default();
    file.put("proj_out.weight", &matrix(4, 3, &WEIGHT));
    WeightSource::from_bytes("base", file.bytes()).unwrap()
}

/// How an adapter stores the same update.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Lora,
    Dora,
    /// A full difference, with or without magnitudes: the same change in another form.
    Difference,
    DoraOfDifference,
}

fn adapter(i: usize, kind: Kind) -> Lora {
    let mut file = File::default();
    let [down, up] = [matrix(2, 3, &DOWN[i]), matrix(4, 2, &UP[i])];
    match kind {
        Kind::Lora | Kind::Dora => {
            file.put("proj_out.lora_A.weight", &down);
            file.put("proj_out.lora_B.weight", &up);
            file.put_number("proj_out.alpha", 4.0);
        }
        Kind::Difference | Kind::DoraOfDifference => {
            file.put("proj_out.diff", &Matrix::filled(4, 3, 0.0).plus(2.0, &up.times(&down)));
        }
    }
    if matches!(kind, Kind::Dora | Kind::DoraOfDifference) {
        file.tensors.insert("proj_out.dora_scale".into(), (vec![4, 1], MAGNITUDES[i].to_vec()));
    }
    file.lora()
}

fn resolve(
    rule: Option<DoraRule>,
    adapters: &[(Kind, f32)],
) -> kiln_weights::Result<(Matrix, Vec<kiln_weights::LoraReport>)> {
    let source = base();
    let loras = adapters.iter().enumerate().map(|(i, (kind, weight))| (adapter(i, *kind), *weight));
    let options = LoraOptions { dora_rule: rule, ..LoraOptions::default() };
    let (updates, reports) = LoraUpdates::resolve(&source, &layers(&source), loras, options)?;
    Ok((effective(&source.root().with_loras(&updates).linear("proj_out", 4, 3)?), reports))
}

fn with(rule: DoraRule, adapters: &[(Kind, f32)]) -> Matrix {
    resolve(Some(rule), adapters).unwrap().0
}

#[test]
fn the_diffusers_rule_is_pefts() {
    use Kind::{Dora, Lora};
    type Stack = &'static [(Kind, f32)];
    let cases: [(Stack, [f32; 12]); 7] = [
        (
            &[(Dora, 1.0)],
            [
                1.143095, 0.163299, 1.632993, 1.011868, -1.011868, 0.449719, -0.14535, 2.325608, -1.889556,
                0.326464, -0.108821, 0.362738,
            ],
        ),
        (
            &[(Dora, 0.5)],
            [
                0.884652, -0.294884, 1.769303, 1.417252, -0.472417, -0.134976, -0.390935, 2.606233,
                -1.433428, 0.382433, -0.067488, 0.314945,
            ],
        ),
        (
            &[(Dora, -1.0)],
            [
                -0.534523, -1.603567, 1.069045, 0.882523, 0.764853, -0.941357, -0.473029, -1.261412, 2.6805,
                0.4445, 0.1905, -0.127,
            ],
        ),
        (
            &[(Dora, 0.0)],
            [
                0.436436, -0.872872, 1.745743, 1.326978, 0.221163, -0.663489, -1.224745, 2.44949, 1.224745,
                0.447214, 0.0, 0.223607,
            ],
        ),
        (
            &[(Dora, 0.5), (Dora, 1.0)],
            [
                0.737175, -0.330908, 0.516034, 2.379944, -0.997269, 0.807678, -0.524451, 0.930852, -0.397561,
                -0.086583, 0.134413, 1.152519,
            ],
        ),
        (
            &[(Lora, 1.0), (Dora, 0.5)],
            [
                0.915872, -0.083261, 0.874241, 2.072963, -1.65837, 1.174679, -0.389742, 1.705121, -1.266661,
                1.672667, -0.522708, 2.613542,
            ],
        ),
        (
            &[(Dora, 0.5), (Lora, 2.0)],
            [
                4.884652, -2.294884, 2.269303, 4.417252, -1.972417, 2.115024, -3.390935, 4.106234, -1.433428,
                -0.617567, 0.432512, 2.814945,
            ],
        ),
    ];
    for (adapters, expected) in cases {
        let expected = matrix(4, 3, &expected);
        with(DoraRule::Diffusers, adapters).assert_near(&expected, 2e-6, "adapters");
        // The same changes as differences patch the weight instead of the output.
        let full = adapters.iter().map(|(kind, weight)| {
            (if *kind == Dora { Kind::DoraOfDifference } else { Kind::Difference }, *weight)
        });
        with(DoraRule::Diffusers, &full.collect::<Vec<_>>()).assert_near(&expected, 2e-6, "differences");
    }
}

#[test]
fn the_rules_agree_for_one_dora_of_weight_1_and_differ_otherwise() {
    use Kind::{Dora, Lora};
    let difference = |adapters: &[(Kind, f32)]| {
        let [a, b] = [DoraRule::ComfyUi, DoraRule::Diffusers].map(|rule| with(rule, adapters).values);
        a.iter().zip(&b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
    };
    assert!(difference(&[(Dora, 1.0)]) < 1e-6 && difference(&[(Lora, 0.5), (Lora, 2.0)]) < 1e-6);
    assert!(difference(&[(Dora, 0.5)]) > 0.01 && difference(&[(Lora, 1.0), (Dora, 1.0)]) > 0.01);
    // The default mixes with the unchanged layer, so that 0 switches it off.
    with(DoraRule::ComfyUi, &[(Dora, 0.0)]).assert_near(&matrix(4, 3, &WEIGHT), 0.0, "off");
}

#[test]
fn a_note_says_when_the_rule_matters_and_none_was_chosen() {
    use Kind::{Dora, Lora};
    let noted = |rule, adapters: &[(Kind, f32)]| {
        let (_, reports) = resolve(rule, adapters).unwrap();
        reports.iter().filter(|r| r.notes.iter().any(|note| note.contains("--dora-rule"))).count()
    };
    assert_eq!(noted(None, &[(Dora, 1.0)]), 0);
    assert_eq!(noted(None, &[(Dora, 0.5)]), 1);
    assert_eq!(noted(None, &[(Dora, 1.0), (Lora, 1.0)]), 1);
    assert_eq!(noted(None, &[(Lora, 0.5), (Lora, 0.5)]), 0);
    assert_eq!(noted(Some(DoraRule::ComfyUi), &[(Dora, 0.5)]), 0);
}

#[test]
fn magnitudes_of_columns_are_refused_by_the_diffusers_rule() {
    let mut file = File::default();
    file.put("proj_out.lora_A.weight", &matrix(2, 3, &DOWN[0]));
    file.put("proj_out.lora_B.weight", &matrix(4, 2, &UP[0]));
    file.tensors.insert("proj_out.dora_scale".into(), (vec![1, 3], vec![1.0; 3]));
    let source = base();
    let resolve = |rule| {
        let options = LoraOptions { dora_rule: Some(rule), ..LoraOptions::default() };
        LoraUpdates::resolve(&source, &layers(&source), [(file.lora(), 1.0)], options)
    };
    assert!(resolve(DoraRule::ComfyUi).is_ok());
    match resolve(DoraRule::Diffusers).unwrap_err() {
        Error::Lora { problem, .. } => assert!(matches!(*problem, LoraProblem::DoraOfColumns { .. })),
        other => panic!("{other}"),
    }
}

//! Tokenizer and schedule compared with values that transformers and diffusers computed, from the repository's golden set.

use std::path::PathBuf;

use kiln_family::flux2::{MISTRAL, QWEN3};
use kiln_nn::schedule::{Schedule, SchedulerConfig, SigmaSpacing, empirical_mu};
use kiln_nn::tokenizer::PromptTokenizer;
use serde::Deserialize;

fn golden(name: &str) -> Vec<u8> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../testdata").join(name);
    std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

#[derive(Deserialize)]
struct Tokenized {
    name: String,
    prompt: String,
    n_tokens: usize,
    n_tokens_untruncated: usize,
    input_ids_512: Vec<u32>,
}

#[derive(Deserialize)]
struct TokenizerReference {
    prompts: Vec<Tokenized>,
}

#[test]
fn the_built_in_tokenizer_gives_the_reference_ids() {
    let reference: TokenizerReference = serde_json::from_slice(&golden("tokenizer_reference.json")).unwrap();
    let tokenizer = PromptTokenizer::built_in(&QWEN3).unwrap();
    assert_eq!(reference.prompts.len(), 74);
    for p in &reference.prompts {
        let tokens = tokenizer.encode(&p.prompt, 512).unwrap();
        assert_eq!(tokens.real, 0..p.n_tokens, "{}", p.name);
        assert_eq!(tokens.ids, p.input_ids_512, "{}", p.name);
        assert_eq!(tokenizer.count(&p.prompt).unwrap(), p.n_tokens_untruncated, "{}", p.name);
    }
}

#[test]
fn mistrals_tokenizer_gives_the_reference_ids() {
    let reference: TokenizerReference =
        serde_json::from_slice(&golden("dev/tokenizer_reference.json")).unwrap();
    let tokenizer = PromptTokenizer::built_in(&MISTRAL).unwrap();
    assert_eq!(reference.prompts.len(), 82);
    for p in &reference.prompts {
        let tokens = tokenizer.encode(&p.prompt, 512).unwrap();
        assert_eq!(tokens.real, 512 - p.n_tokens..512, "{}", p.name);
        assert_eq!(tokens.ids, p.input_ids_512, "{}", p.name);
        assert_eq!(tokenizer.count(&p.prompt).unwrap(), p.n_tokens_untruncated, "{}", p.name);
        let fewer = tokenizer.encode(&p.prompt, 64).unwrap();
        let real = p.n_tokens.min(64);
        assert_eq!(fewer.real, 64 - real..64, "{}", p.name);
        assert_eq!(fewer.ids[fewer.real], p.input_ids_512[512 - p.n_tokens..][..real], "{}", p.name);
    }
}

#[test]
fn typed_padding_counts_as_text() {
    let tokenizer = PromptTokenizer::built_in(&QWEN3).unwrap();
    let plain = tokenizer.encode("a", 64).unwrap();
    let typed = tokenizer.encode("a<|endoftext|>", 64).unwrap();
    assert_eq!(typed.real, 0..plain.real.end + 1);
    assert!(typed.ids[typed.real].contains(&151643));
}

#[derive(Deserialize)]
struct ScheduleCase {
    image_seq_len: usize,
    steps: usize,
    mu: f64,
    sigmas: Option<Vec<f32>>,
}

#[derive(Deserialize)]
struct Oracles {
    schedule: Vec<ScheduleCase>,
}

#[test]
fn sigmas_are_bit_exact_with_diffusers() {
    let oracles: Oracles = serde_json::from_slice(&golden("reference/oracles.json")).unwrap();
    let config = SchedulerConfig::default();
    let mut compared = 0;
    for o in &oracles.schedule {
        let mu = empirical_mu(&config.dynamic_shift, o.image_seq_len, o.steps);
        assert!((mu - o.mu).abs() < 1e-12, "mu {mu}, expected {}", o.mu);
        if let Some(sigmas) = &o.sigmas {
            let ours = Schedule::new(&config, SigmaSpacing::Shifted, o.image_seq_len, o.steps, None);
            assert_eq!(ours.sigmas(), sigmas, "{} tokens, {} steps", o.image_seq_len, o.steps);
            compared += 1;
        }
    }
    assert!(compared > 30);
}

#[test]
fn the_power_schedule_is_a_power_of_a_linear_one() {
    let config = SchedulerConfig::default();
    let schedule = |rho| Schedule::new(&config, SigmaSpacing::Power { rho }, 16, 4, None);
    assert_eq!(schedule(1.0).sigmas(), [1.0, 0.75, 0.5, 0.25, 0.0]);
    assert_eq!(schedule(2.0).sigmas(), [1.0, 0.75f32.sqrt(), 0.5f32.sqrt(), 0.5, 0.0]);
}

#[test]
fn strength_skips_the_first_steps() {
    let config = SchedulerConfig::default();
    let first =
        |steps, strength| Schedule::new(&config, SigmaSpacing::Shifted, 16, steps, None).first_step(strength);
    assert_eq!(first(5, 0.6), 2);
    assert_eq!(first(4, 0.8), 0);
    assert_eq!(first(4, 1.0), 0);
    // Nothing is left to do, and the image stays.
    assert_eq!(first(4, 0.0), 4);
}

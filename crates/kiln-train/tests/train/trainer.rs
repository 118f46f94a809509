//! What a training must do whatever the numbers: resume to the bit, recompute to the bit, learn, and refuse.

use kiln_nn::transformer::Config;
use kiln_ops::Reference;
use kiln_tensor::{DType, HostTensor};
use kiln_train::{
    AdapterKind, AdapterSettings, Error, Example, LearningRate, NoisyExample, Optimizer, TargetPreset,
    Targets, TrainSettings, Trainer, TrainerState,
};

use crate::golden::{example, transformer};

const B: Reference = Reference::new();

fn config() -> Config {
    serde_json::from_str(
        r#"{"in_channels": 4, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 8,
            "num_attention_heads": 1, "joint_attention_dim": 6, "axes_dims_rope": [2, 2, 2, 2],
            "timestep_guidance_channels": 16}"#,
    )
    .unwrap()
}

fn settings() -> TrainSettings {
    TrainSettings {
        adapter: AdapterSettings { rank: 2, ..AdapterSettings::default() },
        learning_rate: LearningRate { peak: 1e-2, ..LearningRate::default() },
        bf16: false,
        ..TrainSettings::default()
    }
}

fn trainer(settings: TrainSettings) -> Trainer<Reference> {
    Trainer::new(&B, transformer(&B, "trainer", &config(), DType::F32), settings).unwrap()
}

fn examples() -> Vec<Example> {
    let sizes = [(3, 2, 2, vec![]), (2, 1, 3, vec![[1, 2]])];
    sizes.iter().enumerate().map(|(i, size)| example("trainer", i, &config(), size)).collect()
}

fn optimizers() -> [Optimizer; 3] {
    let (betas, eps, weight_decay) = ([0.9, 0.999], 1e-8, 0.01);
    [
        Optimizer::AdamW { betas, eps, weight_decay },
        Optimizer::AdamW8bit { betas, eps, weight_decay },
        Optimizer::Prodigy { betas, eps, weight_decay, d0: 3e-2, d_coef: 1.0 },
    ]
}

fn same(a: &TrainerState, b: &TrainerState) {
    assert_eq!((a.step, &a.numbers), (b.step, &b.numbers));
    assert_eq!(a.tensors.keys().collect::<Vec<_>>(), b.tensors.keys().collect::<Vec<_>>());
    for (name, tensor) in &a.tensors {
        assert!(tensor.bytes() == b.tensors[name].bytes(), "{name} differs");
    }
}

#[test]
fn a_resumed_training_continues_to_the_bit() {
    let examples = examples();
    for optimizer in optimizers() {
        let adapter = AdapterSettings { dropout: 0.2, ..settings().adapter };
        let settings = TrainSettings { optimizer, adapter, ema_decay: Some(0.9), ..settings() };
        let mut whole = trainer(settings.clone());
        for _ in 0..2 {
            whole.step(&[&examples]).unwrap();
        }
        let state = whole.state().unwrap();
        let model = transformer(&B, "trainer", &config(), DType::F32);
        let mut resumed = Trainer::restore(&B, model, settings, &state).unwrap();
        same(&state, &resumed.state().unwrap());
        let reports = [&mut whole, &mut resumed].map(|t| t.step(&[&examples[..1], &examples[1..]]).unwrap());
        assert_eq!(reports[0], reports[1]);
        same(&whole.state().unwrap(), &resumed.state().unwrap());
    }
}

#[test]
fn recomputed_blocks_give_the_same_gradients() {
    let examples = examples();
    for kind in [AdapterKind::Lora, AdapterKind::Lokr, AdapterKind::Dora] {
        let adapter = AdapterSettings { kind, dropout: 0.3, ..settings().adapter };
        let states = [false, true].map(|checkpointing| {
            let mut trainer =
                trainer(TrainSettings { adapter: adapter.clone(), checkpointing, ..settings() });
            trainer.step(&[&examples]).unwrap();
            trainer.step(&[&examples]).unwrap();
            trainer.state().unwrap()
        });
        same(&states[0], &states[1]);
    }
}

#[test]
fn every_optimizer_lowers_the_loss() {
    let examples = examples();
    let sigmas = [0.4, 0.7];
    for optimizer in optimizers() {
        let peak = if matches!(optimizer, Optimizer::Prodigy { .. }) { 1.0 } else { 3e-2 };
        let learning_rate = LearningRate { peak, ..LearningRate::default() };
        let mut trainer =
            trainer(TrainSettings { optimizer, learning_rate, ema_decay: Some(0.5), ..settings() });
        let before = trainer.evaluate(&examples, &sigmas, 1).unwrap();
        for step in 1..=30 {
            assert_eq!(trainer.step(&[&examples]).unwrap().step, step);
        }
        let after = trainer.evaluate(&examples, &sigmas, 1).unwrap();
        assert!(after < 0.95 * before, "{optimizer:?}: {before} became {after}");
        let (now, average) = (trainer.adapter().unwrap(), trainer.ema_adapter().unwrap().unwrap());
        assert_ne!(now[0].tensors["lora_B.weight"], average[0].tensors["lora_B.weight"]);
    }
}

#[test]
fn a_fresh_adapter_changes_nothing_and_a_trained_one_does() {
    let examples = examples();
    let losses: Vec<f32> = [AdapterKind::Lora, AdapterKind::Lokr, AdapterKind::Dora]
        .map(|kind| {
            let adapter = AdapterSettings { kind, ..settings().adapter };
            let mut trainer = trainer(TrainSettings { adapter, ..settings() });
            let before = trainer.evaluate(&examples, &[0.4, 0.7], 1).unwrap();
            trainer.step(&[&examples]).unwrap();
            assert_ne!(trainer.evaluate(&examples, &[0.4, 0.7], 1).unwrap(), before);
            before
        })
        .to_vec();
    assert!(losses.iter().all(|loss| (loss - losses[0]).abs() < 1e-5 * losses[0]), "{losses:?}");
}

#[test]
fn accumulated_batches_have_the_mean_gradient() {
    let examples = examples();
    let noisy = [NoisyExample::with_sigma(&examples[0], 0.5, 3).unwrap()];
    let reports = [&[&noisy[..]][..], &[&noisy[..], &noisy[..]]]
        .map(|batches| trainer(settings()).step_noisy(batches).unwrap());
    let near = |a: f32, b: f32| (a - b).abs() < 1e-5 * a;
    assert!(near(reports[0].loss, reports[1].loss) && near(reports[0].grad_norm, reports[1].grad_norm));
}

#[test]
fn only_adapted_layers_have_weights() {
    let targets = Targets::Preset(TargetPreset::Identity);
    let adapter = AdapterSettings { targets, ..settings().adapter };
    let mut trainer = trainer(TrainSettings { adapter, ..settings() });
    trainer.step(&[&examples()]).unwrap();
    let layers: Vec<String> = trainer.adapter().unwrap().into_iter().map(|module| module.layer).collect();
    let block = "single_transformer_blocks.0.attn";
    assert_eq!(layers, [format!("{block}.to_out"), format!("{block}.to_qkv_mlp_proj")]);
}

#[test]
fn what_does_not_fit_is_refused() {
    let mut trainer = trainer(settings());
    let mut wrong = examples();
    wrong[1].height = 5;
    let error = trainer.step(&[&wrong]).unwrap_err().to_string();
    assert_eq!(error, "the latents have shape [3, 4], expected [15, 4]");
    let mut broken = examples();
    broken[0].latents = HostTensor::from_f32([4, 4], vec![f32::NAN; 16]).unwrap();
    let before = trainer.state().unwrap();
    let error = trainer.step(&[&broken]).unwrap_err();
    assert!(matches!(error, Error::NotFinite { what: "the loss", step: 1 }), "{error}");
    same(&before, &trainer.state().unwrap());
    assert!(trainer.step(&[]).is_err());
    let mut state = before;
    state.tensors.pop_first();
    let model = transformer(&B, "trainer", &config(), DType::F32);
    let error = Trainer::restore(&B, model, settings(), &state).err().unwrap().to_string();
    assert!(error.starts_with("the state has no tensor `adapter."), "{error}");
    let model = transformer(&B, "trainer", &config(), DType::F32);
    let error = Trainer::new(&B, model, TrainSettings::default()).err().unwrap().to_string();
    assert_eq!(error, "the transformer computes in f32, expected bf16");
}

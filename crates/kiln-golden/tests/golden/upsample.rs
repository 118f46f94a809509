//! Prompt upsampling on the tiny dev model: conversation, vision tower and language model against diffusers' dumps.

use std::path::Path;
use std::sync::LazyLock;

use kiln_cpu::CpuBackend;
use kiln_engine::Model;
use kiln_engine::upsample::PromptRewriter;
use kiln_family::flux2;
use kiln_golden::{Checkpoint, testdata};
use kiln_nn::language_model::{self, Continuation, Sampling};
use kiln_nn::text_encoder::Config;
use kiln_nn::tokenizer::PromptTokenizer;
use kiln_nn::vision::{self, Patches, VisionTower};
use kiln_nn::{MAX_NEW_TOKENS, ResidencyPlan, Upsampler, config};
use kiln_ops::Backend;
use kiln_tensor::{DType, HostTensor};
use kiln_weights::{Component, WeightSource};
use serde_json::Value;

const CASES: [&str; 4] = ["t2i_short", "t2i_quotes", "i2i_1image", "i2i_2images_concatenated"];

/// The side of a patch in pixels.
const PATCH: usize = 14;

struct Tiny {
    b: CpuBackend,
    config: Config,
    vision: vision::Config,
    weights: WeightSource,
    tokenizer: PromptTokenizer,
    dump: WeightSource,
    info: Value,
}

/// The model, for all tests.
static TINY: LazyLock<Tiny> = LazyLock::new(Tiny::open);
static UPSAMPLER: LazyLock<Upsampler<CpuBackend>> = LazyLock::new(|| TINY.upsampler());

impl Tiny {
    /// Opens the model. Its folder is removed again: the files are mapped.
    fn open() -> Tiny {
        let folder = Checkpoint::assemble(&testdata().join("dev"), "dev").unwrap();
        let encoder = folder.path().join("text_encoder");
        let weights = WeightSource::open_component(&encoder, Component::TextEncoder).unwrap();
        let json = std::fs::read_to_string(encoder.join("config.json")).unwrap();
        let reference = testdata().join("dev/reference");
        Tiny {
            b: CpuBackend::new(Default::default()).unwrap(),
            config: config::read(&encoder.join("config.json")).unwrap(),
            vision: vision::Config::read(&weights, Some(&json)).unwrap(),
            weights,
            tokenizer: PromptTokenizer::built_in(&flux2::MISTRAL).unwrap(),
            dump: WeightSource::open(reference.join("upsample.safetensors")).unwrap(),
            info: config::read(&reference.join("upsample.json")).unwrap(),
        }
    }

    fn upsampler(&self) -> Upsampler<CpuBackend> {
        let (vars, plan) = (self.weights.root(), ResidencyPlan::all_on_device());
        Upsampler::load(&self.b, &vars, &self.config, Some(&self.vision), DType::F32, &plan).unwrap()
    }

    fn values(&self, name: &str) -> Vec<f32> {
        self.dump.tensor(name).unwrap().to_f32().unwrap().into_owned()
    }

    fn ids(&self, name: &str) -> Vec<u32> {
        let ids = self.dump.tensor(name).unwrap();
        ids.bytes().chunks_exact(4).map(|b| u32::from_le_bytes(b.try_into().unwrap())).collect()
    }

    /// Reads a case's conversation. Returns it and the logits of the answer's first token.
    fn start(&self, case: &str) -> (Continuation<CpuBackend>, Vec<f32>) {
        let patches = self.patches(case);
        let grid = patches.as_ref().map(Patches::token_grid);
        let conversation = self.tokenizer.conversation(self.prompt(case), grid).unwrap();
        let embeddings = UPSAMPLER.embed(&self.b, &conversation, patches.as_ref()).unwrap();
        UPSAMPLER.language_model().start(&self.b, &embeddings, &mut || Ok(())).unwrap()
    }

    fn prompt(&self, case: &str) -> &str {
        self.info["cases"][case]["prompt"].as_str().unwrap()
    }

    /// The dumped pixels of a case with images, cut into patches.
    fn patches(&self, case: &str) -> Option<Patches> {
        let pixels = self.dump.tensor(&format!("{case}.pixel_values")).ok()?;
        let [_, channels, height, width] = *pixels.shape().dims() else { panic!("not an image") };
        let pixels = pixels.to_f32().unwrap();
        let grid = [height / PATCH, width / PATCH];
        let mut values = Vec::new();
        for (row, column) in (0..grid[0]).flat_map(|row| (0..grid[1]).map(move |column| (row, column))) {
            for line in (0..channels).flat_map(|c| (0..PATCH).map(move |y| c * height + row * PATCH + y)) {
                values.extend_from_slice(&pixels[line * width + column * PATCH..][..PATCH]);
            }
        }
        let values = HostTensor::from_f32([grid[0] * grid[1], values.len() / (grid[0] * grid[1])], values);
        Some(Patches { values: values.unwrap(), grid })
    }
}

fn relative_error(ours: &[f32], expected: &[f32]) -> f64 {
    assert_eq!(ours.len(), expected.len());
    let square = |x: f32| f64::from(x).powi(2);
    let difference: f64 = ours.iter().zip(expected).map(|(a, b)| square(a - b)).sum();
    (difference / expected.iter().map(|x| square(*x)).sum::<f64>()).sqrt()
}

fn image(name: &str) -> kiln_image::RgbImage {
    kiln_image::open(&testdata().join("dev/reference").join(Path::new(name))).unwrap()
}

#[test]
fn conversations_have_the_dumped_ids() {
    let tiny = &*TINY;
    for case in CASES {
        let grid = tiny.patches(case).map(|patches| patches.token_grid());
        let conversation = tiny.tokenizer.conversation(tiny.prompt(case), grid).unwrap();
        assert_eq!(conversation.ids, tiny.ids(&format!("{case}.input_ids")), "{case}");
    }
}

#[test]
fn images_are_prepared_as_dumped() {
    let tiny = &*TINY;
    let (a, b) = (image("ref_a_80x70.png"), image("ref_b_64x112.png"));
    for (case, images) in [("i2i_1image", vec![&a]), ("i2i_2images_concatenated", vec![&a, &b])] {
        let ours = Patches::new(&images, &tiny.vision).unwrap();
        let expected = tiny.patches(case).unwrap();
        assert_eq!(ours.grid, expected.grid, "{case}");
        let (ours, expected) = (ours.values.to_f32().unwrap(), expected.values.to_f32().unwrap());
        let worst = ours.iter().zip(&*expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        // The dump is torchvision's; Pillow, which is followed here, rounds some bytes the other way: 1 / 255 / 0.26.
        assert!(worst < 0.0152, "{case}: {worst}");
        assert!(relative_error(&ours, &expected) < 1e-3, "{case}");
    }
    // More than 768² pixels are shrunk first, and sides become multiples of 28.
    let large = kiln_image::resize(&a, 1000, 700, kiln_image::Filter::Bicubic);
    assert_eq!(Patches::new(&[&large], &tiny.vision).unwrap().token_grid(), [644 / 28, 924 / 28]);
}

#[test]
fn vision_tower_and_projector_give_the_dumped_states() {
    let tiny = &*TINY;
    let (vars, plan) = (tiny.weights.root(), ResidencyPlan::all_on_device());
    let dim = tiny.config.hidden_size;
    let tower = VisionTower::load(&tiny.b, &vars, &tiny.vision, dim, DType::F32, &plan).unwrap();
    for case in &CASES[2..] {
        let patches = tiny.patches(case).unwrap();
        let states = tiny.b.download(&tower.encode(&tiny.b, &patches).unwrap()).unwrap();
        let error =
            relative_error(&states.to_f32().unwrap(), &tiny.values(&format!("{case}.vision_tower_out")));
        assert!(error < 1e-5, "{case}: {error:e}");
        let tokens = tiny.b.download(&tower.forward(&tiny.b, &patches).unwrap()).unwrap();
        let error = relative_error(&tokens.to_f32().unwrap(), &tiny.values(&format!("{case}.projector_out")));
        assert!(error < 1e-5, "{case}: {error:e}");
    }
}

/// Steps that are compared one by one; whole texts are compared below.
const STEPS: usize = 64;

#[test]
fn greedy_tokens_and_logits_are_the_dumped_ones() {
    let (tiny, model) = (&*TINY, UPSAMPLER.language_model());
    for case in CASES {
        let (mut text, mut logits) = tiny.start(case);
        let ids = tiny.ids(&format!("{case}.greedy.generated_ids"));
        let gaps = tiny.values(&format!("{case}.greedy.top2_gap"));
        let top_ids = tiny.ids(&format!("{case}.greedy.logits_top50_ids"));
        let top = tiny.values(&format!("{case}.greedy.logits_top50"));
        let mut greedy = language_model::Sampler::new(Sampling::Greedy);
        for (step, (id, gap)) in ids.iter().zip(gaps).take(STEPS).enumerate() {
            if let (Some(top), Some(top_ids)) = (top.chunks(50).nth(step), top_ids.chunks(50).nth(step)) {
                let ours: Vec<f32> = top_ids.iter().map(|id| logits[*id as usize]).collect();
                let error = relative_error(&ours, top);
                assert!(error < 1e-5, "{case}, step {step}: {error:e}");
            }
            if gap < 1e-3 {
                assert!(step > 20, "{case}: compared only {step} steps");
                break;
            }
            assert_eq!(greedy.choose(&logits), *id, "{case}, step {step}");
            logits = model.next(&tiny.b, &mut text, *id).unwrap();
        }
    }
}

#[test]
fn tokens_are_drawn_with_the_dumped_probabilities() {
    let (tiny, model) = (&*TINY, UPSAMPLER.language_model());
    for case in CASES {
        let (mut text, mut logits) = tiny.start(case);
        let name = |what: &str| format!("{case}.temperature0.15.{what}");
        let (ids, expected) = (tiny.ids(&name("generated_ids")), tiny.values(&name("probs_top50")));
        let top_ids = tiny.ids(&name("logits_top50_ids"));
        for (step, expected) in expected.chunks(50).enumerate() {
            let candidates = language_model::probabilities(&logits, 0.15);
            for (id, expected) in top_ids[50 * step..].iter().zip(expected) {
                let found = candidates.iter().find(|(candidate, _)| candidate == id).map_or(0.0, |(_, p)| *p);
                let difference = (found - f64::from(*expected)).abs();
                // A logit's error of 1e-5 is 7e-5 after the division by the temperature.
                assert!(
                    difference < 1e-3 * found + 1e-6,
                    "{case}, step {step}: {found}, expected {expected}"
                );
            }
            logits = model.next(&tiny.b, &mut text, ids[step]).unwrap();
        }
    }
}

#[test]
fn a_prompt_is_rewritten_to_the_dumped_text() {
    let tiny = &*TINY;
    let expected = |case: &str| tiny.info["cases"][case][format!("{case}.greedy")].clone();
    for case in ["t2i_short", "t2i_quotes"] {
        let mut tokens = 0;
        let mut count = |done| {
            tokens = done;
            Ok(())
        };
        let prompt = tiny.prompt(case);
        let text = UPSAMPLER.rewrite(&tiny.b, &tiny.tokenizer, prompt, None, Sampling::Greedy, &mut count);
        assert_eq!(text.unwrap(), expected(case)["decoded"].as_str().unwrap(), "{case}");
        // The end is not counted.
        assert!(expected(case)["ends_with_eos"].as_bool().unwrap());
        assert_eq!(tokens as u64 + 1, expected(case)["n_generated"].as_u64().unwrap(), "{case}");
    }
}

#[test]
fn an_answer_sees_the_image_and_ends_at_the_limit() {
    const LIMIT: usize = 12;
    let (tiny, case) = (&*TINY, "i2i_1image");
    let patches = tiny.patches(case);
    let grid = patches.as_ref().map(Patches::token_grid);
    let conversation = tiny.tokenizer.conversation(tiny.prompt(case), grid).unwrap();
    let answer = |sampling| {
        UPSAMPLER.answer(&tiny.b, &conversation, patches.as_ref(), sampling, LIMIT, &mut |_| Ok(())).unwrap()
    };
    let dumped = tiny.ids(&format!("{case}.greedy.generated_ids"));
    assert_eq!(dumped.len(), MAX_NEW_TOKENS, "the dump ends at the limit, too");
    assert_eq!(answer(Sampling::Greedy), dumped[..LIMIT]);
    assert_ne!(answer(Sampling::Random { temperature: 2.0, seed: 1 }), dumped[..LIMIT]);
}

#[test]
fn reading_a_conversation_can_be_stopped() {
    let tiny = &*TINY;
    let conversation = tiny.tokenizer.conversation("a cat", None).unwrap();
    let mut asked = 0;
    let stopped = UPSAMPLER.answer(&tiny.b, &conversation, None, Sampling::Greedy, 1, &mut |_| {
        asked += 1;
        if asked == 2 { Err(kiln_nn::Error::Cancelled) } else { Ok(()) }
    });
    assert!(matches!(stopped, Err(kiln_nn::Error::Cancelled)));
    assert_eq!(asked, 2, "before the second layer");
}

#[test]
fn files_without_head_or_vision_tower_are_refused_by_their_names() {
    let tiny = &*TINY;
    assert_eq!(language_model::problem(&tiny.weights, &tiny.config), None);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("encoder.safetensors");
    let kept = |name: &&str| !name.starts_with("lm_head") && !name.starts_with("vision_tower");
    let tensors: Vec<_> =
        tiny.weights.names().filter(kept).map(|name| (name, tiny.weights.tensor(name).unwrap())).collect();
    kiln_weights::save::save(&file, &tensors, &Default::default()).unwrap();
    let weights = WeightSource::open_component(&file, Component::TextEncoder).unwrap();
    let problem = language_model::problem(&weights, &tiny.config).unwrap();
    assert!(problem.contains("no `lm_head.weight`"), "{problem}");
    let problem = vision::Config::read(&weights, None).unwrap_err();
    assert!(problem.contains("no vision tower"), "{problem}");
}

#[test]
fn a_model_rewrites_with_its_own_encoder_and_tokenizer() {
    let folder = Checkpoint::assemble(&testdata().join("dev"), "dev").unwrap();
    let file = folder.path().join("packed.safetensors");
    folder.write_single_file(&file, &[]).unwrap();
    PromptRewriter::open(&Model::open(&file).unwrap(), None, true).unwrap();
    // A tokenizer that can't be read shows that it is the one that is used.
    std::fs::create_dir(folder.path().join("tokenizer")).unwrap();
    std::fs::write(folder.path().join("tokenizer/tokenizer.json"), "{}").unwrap();
    let opened = [
        PromptRewriter::open(&Model::open(folder.path()).unwrap(), None, false),
        PromptRewriter::open_file(folder.path(), false),
        PromptRewriter::open_file(&folder.path().join("text_encoder"), false),
    ];
    for rewriter in opened {
        let error = rewriter.err().unwrap().to_string();
        assert!(error.contains("tokenizer.json"), "{error}");
    }
}

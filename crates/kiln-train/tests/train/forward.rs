//! The forward pass that training keeps a tape of against the one that generates images: the two have block bodies of their
//! own, and must say the same.

use kiln_cpu::{CpuBackend, CpuOptions, Isa};
use kiln_nn::transformer::training::{Adapters, Keep, LayerStack, TrainingItem};
use kiln_nn::transformer::{
    BatchItem, Config, Position, References, RopeTables, Transformer, TransformerBatch,
};
use kiln_ops::signatures::*;
use kiln_ops::{Backend, Reference, TrainingBackend, backend_methods};

use crate::golden::{example, transformer};

/// Adapters of no layer.
struct NoAdapters;

impl<B: TrainingBackend> Adapters<B> for NoAdapters {
    type Saved = ();

    fn is_adapted(&self, _: &LayerStack) -> bool {
        false
    }

    fn forward(
        &self,
        _: &B,
        _: &LayerStack,
        _: &B::Weight,
        _: &B::Tensor,
        _: &[usize],
    ) -> kiln_nn::Result<(Vec<B::Tensor>, ())> {
        unreachable!("no layer is adapted")
    }

    fn backward(
        &mut self,
        _: &B,
        _: &LayerStack,
        _: &B::Weight,
        _: &B::Tensor,
        _: (),
        _: &[&B::Tensor],
        _: bool,
    ) -> kiln_nn::Result<Option<B::Tensor>> {
        unreachable!("no layer is adapted")
    }
}

fn config() -> Config {
    serde_json::from_str(
        r#"{"in_channels": 12, "num_layers": 2, "num_single_layers": 3, "attention_head_dim": 16,
            "num_attention_heads": 3, "joint_attention_dim": 20, "axes_dims_rope": [4, 4, 4, 4],
            "timestep_guidance_channels": 16, "guidance_embeds": true}"#,
    )
    .unwrap()
}

/// A backend with training's operations where the inference has faster ones: a gated product is rounded before it is added
/// to the residual, and attention also computes what its gradient needs. Everything else that the two forward passes call is
/// the same operation.
#[derive(Clone)]
struct Unfused<B> {
    inner: B,
}

macro_rules! forward {
    ($self:ident, linear_gated_add($xs:ident, $w:ident, $gate:ident, $residual:ident)) => {{
        let product = match $xs {
            [x] => $self.inner.linear(x, $w)?,
            parts => $self.inner.linear(&$self.inner.concat_columns(parts)?, $w)?,
        };
        let (gate, groups) = $gate.unwrap();
        $self.inner.gated_add(&product, gate, groups, $residual)
    }};
    ($self:ident, attention($q:ident, $k:ident, $v:ident, $spec:ident)) => {
        $self.inner.attention_lse($q, $k, $v, $spec).map(|[out, _]| out)
    };
    ($self:ident, $method:ident $arguments:tt) => { $self.inner.$method $arguments };
}

impl<B: TrainingBackend> Backend for Unfused<B> {
    type Tensor = B::Tensor;
    type Weight = B::Weight;
    type Conv = B::Conv;
    type GraphCache = ();

    fn name(&self) -> String {
        format!("{}, unfused", self.inner.name())
    }

    backend_methods!(required, forward);
}

/// Text, latents, references and rotary tables of two examples, one of them with a reference.
type Inputs<B> =
    Vec<(<B as Backend>::Tensor, <B as Backend>::Tensor, Option<<B as Backend>::Tensor>, RopeTables<B>)>;

const TIMESTEP: f32 = 0.7;
const GUIDANCE: Option<f32> = Some(3.5);

fn inputs<B: Backend>(b: &B, model: &Transformer<B>) -> Inputs<B> {
    let sizes = [(7, 3, 5, vec![]), (9, 2, 4, vec![[3, 2]])];
    let inputs = sizes.iter().enumerate().map(|(i, size)| {
        let example = example("forward", i, model.config(), size);
        let upload = |tensor| b.upload(tensor, DType::F32).unwrap();
        let mut positions = Position::grid(0, example.height, example.width);
        let reference = example.references.first().map(|reference| {
            positions.extend(Position::grid(10, reference.height, reference.width));
            upload(&reference.latents)
        });
        let rope = model.rope_tables(b, &Position::text(size.0), &positions).unwrap();
        (upload(&example.text), upload(&example.latents), reference, rope)
    });
    inputs.collect()
}

fn values<B: Backend>(b: &B, tensor: &B::Tensor) -> Vec<f32> {
    b.download(tensor).unwrap().to_f32().unwrap().to_vec()
}

/// The velocities, as images are generated.
fn generated<B: Backend>(b: &B) -> Vec<f32> {
    let model = transformer(b, "forward", &config(), DType::F32);
    let inputs = inputs(b, &model);
    let item = |(text, image, reference, rope)| BatchItem {
        text,
        image,
        references: References::Joint(reference),
        rope,
    };
    let items =
        inputs.iter().map(|(text, image, reference, rope)| item((text, image, reference.as_ref(), rope)));
    let items: Vec<BatchItem<'_, B>> = items.collect();
    let batch = TransformerBatch { items: &items, timestep: TIMESTEP, guidance: GUIDANCE };
    let predictions = model.forward(b, &batch, &mut ()).unwrap();
    predictions.iter().flat_map(|prediction| values(b, &prediction.velocity)).collect()
}

/// The velocities, as they are trained.
fn trained<B: TrainingBackend>(b: &B) -> Vec<f32> {
    let model = transformer(b, "forward", &config(), DType::F32);
    let inputs = inputs(b, &model);
    let items = inputs.iter().map(|(text, image, reference, rope)| TrainingItem {
        text,
        image,
        references: reference.as_ref(),
        rope,
        timestep: TIMESTEP,
    });
    let items: Vec<TrainingItem<'_, B>> = items.collect();
    let (velocity, _) = model.forward_training(b, &items, GUIDANCE, &NoAdapters, Keep::Nothing).unwrap();
    values(b, &velocity)
}

fn difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

fn check<B: TrainingBackend>(b: B) {
    let (name, trained) = (b.name(), trained(&b));
    assert!(
        trained.iter().all(|value| value.is_finite())
            && difference(&trained, &vec![0.0; trained.len()]) > 0.1
    );
    let fused = difference(&trained, &generated(&b));
    assert!(fused < 1e-5, "{name}: with fused operations the velocities differ by {fused:e}");
    let unfused = difference(&trained, &generated(&Unfused { inner: b }));
    assert_eq!(unfused, 0.0, "{name}: with the same operations the velocities differ");
}

#[test]
fn the_forward_pass_of_training_is_that_of_inference_to_the_bit() {
    check(Reference::new());
    for isa in Isa::available() {
        check(CpuBackend::new(CpuOptions { isa: Some(isa), ..CpuOptions::default() }).unwrap());
    }
}

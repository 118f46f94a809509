//! Replayed graphs give the same bits as direct execution, and work that cannot be captured is executed normally.

use std::cell::RefCell;

use kiln_cuda::{CudaBackend, CudaGraphCache, CudaTensor, CudaWeight, Graphs, Options};
use kiln_ops::{
    AttentionMask, AttentionSpec, Backend, Error, Residency, Result, RowGroups, RunMode, TimedBackend,
};
use kiln_tensor::{DType, HostLinear, HostTensor};

/// The GPU, or `None` with a note.
fn gpu(graphs: Graphs, memory_limit: Option<usize>) -> Option<CudaBackend> {
    let options = Options { graphs, memory_limit, ..Options::default() };
    CudaBackend::new(&options).map_err(|e| println!("skipped: {e}")).ok()
}

const WIDTH: usize = 256;
const ROWS: usize = 72;

fn values(rows: usize, seed: usize) -> HostTensor {
    let value = |i: usize| ((i + 7919 * seed).wrapping_mul(2_654_435_761) % 2003) as f32 / 2000.0 - 0.5;
    HostTensor::from_f32([rows, WIDTH], (0..rows * WIDTH).map(value).collect()).unwrap()
}

/// A block similar to the transformer's, which logs the mode of each call.
struct Block {
    qkv: CudaWeight,
    out: CudaWeight,
    up: CudaWeight,
    down: CudaWeight,
    modes: RefCell<Vec<RunMode>>,
}

impl Block {
    fn new(b: &CudaBackend, fp8: bool) -> Block {
        let weight = |rows: usize, cols: usize, seed| {
            let values = values(rows * cols / WIDTH, seed).reshape([rows, cols]).unwrap();
            let parts = HostLinear::dense(vec![values.to_dtype(DType::BF16).unwrap()]).unwrap();
            b.load_weight(if fp8 { parts.with_fp8_matmul().unwrap() } else { parts }, Residency::Device)
                .unwrap()
        };
        Block {
            qkv: weight(3 * WIDTH, WIDTH, 1),
            out: weight(WIDTH, WIDTH, 2),
            up: weight(4 * WIDTH, WIDTH, 3),
            down: weight(WIDTH, 2 * WIDTH, 4),
            modes: RefCell::default(),
        }
    }

    /// `inputs`: the activations and a row that modulates them.
    fn forward(&self, b: &CudaBackend, run: RunMode, inputs: &[&CudaTensor]) -> Result<CudaTensor> {
        self.modes.borrow_mut().push(run);
        let (x, modulation) = (inputs[0], inputs[1]);
        let groups = RowGroups::single(x.shape_rows());
        let h = b.ada_layer_norm(x, modulation, modulation, &groups, 1e-6)?;
        let [q, k, v] = b.linear_split(&h, &self.qkv, [WIDTH; 3])?;
        let spec = AttentionSpec::new(WIDTH / 128, WIDTH / 128, AttentionMask::None);
        let attended = b.attention(&[&q], &[&k], &[&v], &spec)?;
        let x = b.linear_gated_add(&[&attended], &self.out, Some((modulation, &groups)), x)?;
        let h = b.linear_swiglu(&b.concat_rows(&[&x])?, &self.up)?;
        b.linear_gated_add(&[&h], &self.down, None, &x)
    }

    fn modes(&self) -> Vec<RunMode> {
        self.modes.take()
    }
}

trait Rows {
    fn shape_rows(&self) -> usize;
}

impl Rows for CudaTensor {
    fn shape_rows(&self) -> usize {
        kiln_ops::Tensor::shape(self).rows()
    }
}

fn upload(b: &CudaBackend, rows: usize, seed: usize, dtype: DType) -> CudaTensor {
    b.upload(&values(rows, seed), dtype).unwrap()
}

#[test]
fn replays_give_the_same_bits_for_any_inputs() {
    let Some(b) = gpu(Graphs::Always, None) else { return };
    let forms = if b.gpu().has_fp8() { &[false, true][..] } else { &[false] };
    for (&fp8, dtype) in forms.iter().flat_map(|fp8| [(fp8, DType::BF16), (fp8, DType::F32)]) {
        let (block, replays) = (Block::new(&b, fp8), CudaGraphCache::default());
        let same = upload(&b, 1, 50, DType::F32);
        for (time, expected) in
            [&[RunMode::Execute][..], &[RunMode::Record], &[], &[], &[]].into_iter().enumerate()
        {
            let x = upload(&b, ROWS, time, dtype);
            // The same tensor at first, then new ones.
            let modulation = if time < 3 { same.clone() } else { upload(&b, 1, time, DType::F32) };
            let inputs = [&x, &modulation];
            let graph_replays =
                b.replay(&replays, &[], &inputs, |b, run, inputs| block.forward(b, run, inputs));
            assert_eq!(block.modes(), expected);
            let direct = block.forward(&b, RunMode::Execute, &inputs).unwrap();
            block.modes();
            let (graph_replays, direct) =
                (b.download(&graph_replays.unwrap()).unwrap(), b.download(&direct).unwrap());
            assert!(graph_replays == direct, "{dtype}, fp8 {fp8}, call {time}");
            assert!(direct.to_f32().unwrap().iter().all(|v| v.is_finite()));
        }
    }
}

#[test]
fn auto_mode_gives_the_same_bits() {
    let Some(b) = gpu(Graphs::Auto, None) else { return };
    let (block, replays) = (Block::new(&b, false), CudaGraphCache::default());
    let modulation = upload(&b, 1, 50, DType::F32);
    for seed in 0..8 {
        let x = upload(&b, ROWS, seed, DType::BF16);
        let work = |b: &CudaBackend, run, inputs: &[&CudaTensor]| block.forward(b, run, inputs);
        let graph_replays = b.replay(&replays, &[], &[&x, &modulation], work).unwrap();
        let direct = block.forward(&b, RunMode::Execute, &[&x, &modulation]).unwrap();
        assert!(b.download(&graph_replays).unwrap() == b.download(&direct).unwrap(), "call {seed}");
    }
}

#[test]
fn results_survive_the_next_replay() {
    let Some(b) = gpu(Graphs::Always, None) else { return };
    let (block, replays) = (Block::new(&b, false), CudaGraphCache::default());
    let modulation = upload(&b, 1, 50, DType::F32);
    let replay = |seed| {
        let x = upload(&b, ROWS, seed, DType::BF16);
        b.replay(&replays, &[], &[&x, &modulation], |b, run, inputs| block.forward(b, run, inputs)).unwrap()
    };
    replay(0);
    let (one, two) = (replay(1), replay(2));
    let first = b.download(&one).unwrap();
    assert!(first != b.download(&two).unwrap());
    replay(3);
    assert!(first == b.download(&one).unwrap());
}

#[test]
fn each_shape_and_key_is_recorded_separately() {
    let Some(b) = gpu(Graphs::Always, None) else { return };
    let (block, replays) = (Block::new(&b, false), CudaGraphCache::default());
    let modulation = upload(&b, 1, 50, DType::F32);
    let mut last = None;
    // Other row counts, other keys.
    for (rows, key) in [(ROWS, 0), (ROWS + 5, 0), (ROWS, 1), (ROWS, 0), (ROWS + 5, 0), (ROWS, 1)] {
        let x = upload(&b, rows, key, DType::BF16);
        let work = |b: &CudaBackend, run, inputs: &[&CudaTensor]| block.forward(b, run, inputs);
        let y = b.replay(&replays, &[key], &[&x, &modulation], work).unwrap();
        assert_eq!(y.shape_rows(), rows);
        last = Some(block.modes());
    }
    assert_eq!(last, Some(vec![RunMode::Record]));
}

#[test]
fn work_that_cannot_be_captured_is_executed() {
    let Some(b) = gpu(Graphs::Always, None) else { return };
    let (block, replays) = (Block::new(&b, false), CudaGraphCache::default());
    let x = upload(&b, ROWS, 9, DType::F32);
    let expected = [
        &[RunMode::Execute][..],
        &[RunMode::Record, RunMode::Execute],
        &[RunMode::Execute],
        &[RunMode::Execute],
    ];
    for expected in expected {
        let graph_replays = b.replay(&replays, &[], &[&x], |b, run, inputs| {
            // An upload cannot be captured. Handling the error does not help: a replay would skip the upload every time.
            let modulation = b.upload(&values(1, 50), DType::F32);
            let modulation = modulation.or_else(|_| b.slice_rows(inputs[0], 0..1))?;
            block.forward(b, run, &[inputs[0], &modulation])
        });
        assert_eq!(block.modes(), expected);
        let modulation = upload(&b, 1, 50, DType::F32);
        let direct = block.forward(&b, RunMode::Execute, &[&x, &modulation]).unwrap();
        block.modes();
        assert!(b.download(&graph_replays.unwrap()).unwrap() == b.download(&direct).unwrap());
    }
}

#[test]
fn a_timed_backend_counts_every_operation_until_paused() {
    let Some(b) = gpu(Graphs::Always, None) else { return };
    let (b, replays) = (TimedBackend::new(b), CudaGraphCache::default());
    let x = b.upload(&values(ROWS, 1), DType::BF16).unwrap();
    let counted = || {
        b.timer().take();
        b.replay(&replays, &[], &[&x], |b, _, inputs| b.add(inputs[0], inputs[0])).unwrap();
        b.timer().take().iter().map(|count| count.calls).sum::<u64>()
    };
    assert_eq!([counted(), counted(), counted()], [1; 3]);
    b.timer().pause(true);
    assert_eq!([counted(), counted(), counted()], [0; 3]);
    assert_eq!(b.inner().graph_replays(), 2);
    b.timer().pause(false);
    assert_eq!(counted(), 1);
}

#[test]
fn a_graph_keeps_the_weights_and_tensors_it_reads_alive() {
    let Some(b) = gpu(Graphs::Always, None) else { return };
    let replays = CudaGraphCache::default();
    let (block, modulation) = (Block::new(&b, false), upload(&b, 1, 50, DType::F32));
    let (x, y) = (upload(&b, ROWS, 1, DType::BF16), upload(&b, ROWS, 2, DType::BF16));
    // The modulation is not an input.
    let work =
        |b: &CudaBackend, run, inputs: &[&CudaTensor]| block.forward(b, run, &[inputs[0], &modulation]);
    let expected = b.download(&work(&b, RunMode::Execute, &[&x]).unwrap()).unwrap();
    for _ in 0..2 {
        b.replay(&replays, &[], &[&y], work).unwrap();
    }
    assert_eq!(block.modes(), [RunMode::Execute, RunMode::Execute, RunMode::Record]);
    drop((block, modulation));
    // Would reuse their memory if it had been freed.
    let others: Vec<_> = (0..40).map(|seed| upload(&b, 3 * WIDTH, 100 + seed, DType::BF16)).collect();
    let small: Vec<_> = (0..40).map(|seed| upload(&b, 1, 100 + seed, DType::F32)).collect();
    let never =
        |_: &CudaBackend, _: RunMode, _: &[&CudaTensor]| -> Result<CudaTensor> { panic!("not replayed") };
    let graph_replays = b.replay(&replays, &[], &[&x], never).unwrap();
    assert!(b.download(&graph_replays).unwrap() == expected);
    drop((others, small));
}

#[test]
fn work_that_bypasses_the_recording_backend_is_not_recorded() {
    let Some(b) = gpu(Graphs::Always, None) else { return };
    let replays = CudaGraphCache::default();
    for seed in 0..4 {
        let x = upload(&b, ROWS, seed, DType::F32);
        let work = |handed: &CudaBackend, _: RunMode, inputs: &[&CudaTensor]| {
            let twice = b.add(inputs[0], inputs[0])?;
            handed.add(&twice, inputs[0])
        };
        let y = b.replay(&replays, &[], &[&x], work).unwrap();
        let direct = b.add(&b.add(&x, &x).unwrap(), &x).unwrap();
        assert!(b.download(&y).unwrap() == b.download(&direct).unwrap(), "call {seed}");
    }
    assert_eq!(b.graph_replays(), 0);
}

#[test]
fn a_recording_backend_fails_after_the_recording() {
    let Some(b) = gpu(Graphs::Always, None) else { return };
    let (replays, x) = (CudaGraphCache::default(), upload(&b, ROWS, 9, DType::F32));
    let mut kept = None;
    for _ in 0..3 {
        let work = |b: &CudaBackend, run: RunMode, inputs: &[&CudaTensor]| {
            kept = kept.take().or_else(|| (run == RunMode::Record).then(|| b.clone()));
            b.add(inputs[0], inputs[0])
        };
        b.replay(&replays, &[], &[&x], work).unwrap();
    }
    assert_eq!(b.graph_replays(), 2);
    assert!(kept.unwrap().add(&x, &x).is_err());
}

#[test]
fn errors_of_the_work_reach_the_caller() {
    let Some(b) = gpu(Graphs::Always, None) else { return };
    let (replays, x) = (CudaGraphCache::default(), upload(&b, ROWS, 9, DType::BF16));
    for _ in 0..3 {
        let wrong = |_: &CudaBackend, _: RunMode, _: &[&CudaTensor]| -> Result<CudaTensor> {
            Err(Error::Arguments { op: "test", what: "never".into() })
        };
        let error = b.replay(&replays, &[], &[&x], wrong).unwrap_err();
        assert!(matches!(error, Error::Arguments { op: "test", .. }), "{error}");
    }
    // The GPU still works.
    assert!(b.download(&x).is_ok());
}

#[test]
fn work_of_other_threads_is_not_recorded() {
    let Some(b) = gpu(Graphs::Always, None) else { return };
    let (block, replays) = (Block::new(&b, false), CudaGraphCache::default());
    let modulation = upload(&b, 1, 50, DType::F32);
    let other = || -> Result<HostTensor> {
        let x = b.upload(&values(ROWS, 70), DType::BF16)?;
        b.download(&b.add(&x, &x)?)
    };
    let expected = other().unwrap();
    for seed in 0..3 {
        let x = upload(&b, ROWS, seed, DType::BF16);
        let y = b.replay(&replays, &[], &[&x, &modulation], |b, run, inputs| {
            let y = block.forward(b, run, inputs);
            let meanwhile = std::thread::scope(|scope| scope.spawn(|| other().unwrap()).join().unwrap());
            assert!(meanwhile == expected);
            y
        });
        let direct = block.forward(&b, RunMode::Execute, &[&x, &modulation]).unwrap();
        assert!(b.download(&y.unwrap()).unwrap() == b.download(&direct).unwrap());
    }
    use RunMode::{Execute, Record};
    assert_eq!(block.modes(), [Execute, Execute, Record, Execute, Execute]);
}

#[test]
fn graph_memory_is_freed_with_its_owner() {
    let Some(b) = gpu(Graphs::Always, None) else { return };
    let block = Block::new(&b, false);
    let modulation = upload(&b, 1, 50, DType::F32);
    let replay = |replays: &CudaGraphCache, rows: usize| {
        let x = upload(&b, rows, 1, DType::BF16);
        b.replay(replays, &[], &[&x, &modulation], |b, run, inputs| block.forward(b, run, inputs)).unwrap();
    };
    let held = || {
        b.release_memory();
        b.memory_held()
    };
    replay(&CudaGraphCache::default(), ROWS);
    let before = held();
    let replays = CudaGraphCache::default();
    replay(&replays, ROWS);
    assert_eq!(held(), before);
    replay(&replays, ROWS);
    let one = held();
    assert!(one > before, "a recording keeps its memory");
    for rows in [ROWS, ROWS, ROWS] {
        replay(&replays, rows);
    }
    assert_eq!(held(), one, "replaying takes no more");
    // Only the latest graphs are kept.
    for rows in 1..8 {
        replay(&replays, ROWS + rows);
        replay(&replays, ROWS + rows);
    }
    assert!(held() - before < 4 * (one - before), "{before}, {one}, {}", held());
    drop(replays);
    assert_eq!(held(), before);
}

#[test]
fn graphs_are_evicted_when_memory_runs_out() {
    const LIMIT: usize = 100 << 20;
    let Some(b) = gpu(Graphs::Always, Some(LIMIT)) else { return };
    let (block, replays) = (Block::new(&b, false), CudaGraphCache::default());
    let modulation = upload(&b, 1, 50, DType::F32);
    let x = upload(&b, ROWS, 1, DType::BF16);
    let replay = || {
        b.replay(&replays, &[], &[&x, &modulation], |b, run, inputs| block.forward(b, run, inputs)).unwrap()
    };
    let direct = b.download(&replay()).unwrap();
    b.release_memory();
    let without = b.memory_held();
    replay();
    replay();
    assert_eq!(block.modes(), [RunMode::Execute, RunMode::Record]);
    b.release_memory();
    let recorded = b.memory_held();
    assert!(recorded > without);
    // More than fits next to the graph.
    let rows = (LIMIT - (recorded + without) / 2) / (4 * WIDTH);
    let large = upload(&b, rows, 2, DType::F32);
    assert!(b.memory_held() <= LIMIT);
    drop(large);
    assert!(b.download(&replay()).unwrap() == direct);
    replay();
    assert_eq!(block.modes(), [RunMode::Execute, RunMode::Execute]);
}

#[test]
fn nothing_is_recorded_if_disabled_or_weights_are_streamed() {
    let (Some(never), Some(always)) = (gpu(Graphs::Never, None), gpu(Graphs::Always, None)) else { return };
    let Some(limited) = gpu(Graphs::Auto, Some(200 << 20)) else { return };
    let parts = HostLinear::dense(vec![values(2 << 10, 1)]).unwrap();
    let _streamed = always.load_weight(parts, Residency::Host).unwrap();
    for b in [never, always, limited] {
        let (block, replays) = (Block::new(&b, false), CudaGraphCache::default());
        let (x, modulation) = (upload(&b, ROWS, 1, DType::BF16), upload(&b, 1, 50, DType::F32));
        for _ in 0..12 {
            let work = |b: &CudaBackend, run, inputs: &[&CudaTensor]| block.forward(b, run, inputs);
            b.replay(&replays, &[], &[&x, &modulation], work).unwrap();
        }
        assert_eq!(block.modes(), [RunMode::Execute; 12]);
    }
}

//! Work that is recorded and replayed gives the same bits as work that is asked for, and what can't be recorded is done as usual.

use std::cell::RefCell;

use kiln_cuda::{CudaBackend, CudaReplays, CudaTensor, CudaWeight, Graphs, Options};
use kiln_ops::{AttentionSpec, Backend, Error, Groups, Mask, Residency, Result, Run, Timed};
use kiln_tensor::{DType, HostTensor, LinearParts};

/// The GPU, or `None` with a word about it.
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

/// A block much like the transformer's, which counts how it is asked for.
struct Block {
    qkv: CudaWeight,
    out: CudaWeight,
    up: CudaWeight,
    down: CudaWeight,
    asked: RefCell<Vec<Run>>,
}

impl Block {
    fn new(b: &CudaBackend, fp8: bool) -> Block {
        let weight = |rows: usize, cols: usize, seed| {
            let values = values(rows * cols / WIDTH, seed).reshape([rows, cols]).unwrap();
            let parts = LinearParts::dense(vec![values.to_dtype(DType::BF16).unwrap()]).unwrap();
            b.weight(if fp8 { parts.in_fp8().unwrap() } else { parts }, Residency::Device).unwrap()
        };
        Block {
            qkv: weight(3 * WIDTH, WIDTH, 1),
            out: weight(WIDTH, WIDTH, 2),
            up: weight(4 * WIDTH, WIDTH, 3),
            down: weight(WIDTH, 2 * WIDTH, 4),
            asked: RefCell::default(),
        }
    }

    /// Of an input, and of a row that modulates it.
    fn forward(&self, b: &CudaBackend, run: Run, inputs: &[&CudaTensor]) -> Result<CudaTensor> {
        self.asked.borrow_mut().push(run);
        let (x, modulation) = (inputs[0], inputs[1]);
        let groups = Groups::one(x.shape_rows());
        let h = b.ada_layer_norm(x, modulation, modulation, &groups, 1e-6)?;
        let [q, k, v] = b.linear_split(&h, &self.qkv, [WIDTH; 3])?;
        let spec = AttentionSpec { heads: WIDTH / 128, kv_heads: WIDTH / 128, mask: Mask::None };
        let attended = b.attention(&[&q], &[&k], &[&v], &spec)?;
        let x = b.linear_gated_add(&[&attended], &self.out, Some((modulation, &groups)), x)?;
        let h = b.linear(&b.concat_rows(&[&x])?, &self.up)?;
        b.swiglu_gated_add(None, &h, &self.down, None, &x)
    }

    fn asked(&self) -> Vec<Run> {
        self.asked.take()
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
fn replayed_work_gives_the_same_bits_whatever_its_inputs() {
    let Some(b) = gpu(Graphs::Always, None) else { return };
    let forms = if b.gpu().has_fp8() { &[false, true][..] } else { &[false] };
    for (&fp8, dtype) in forms.iter().flat_map(|fp8| [(fp8, DType::BF16), (fp8, DType::F32)]) {
        let (block, replays) = (Block::new(&b, fp8), CudaReplays::default());
        let same = upload(&b, 1, 50, DType::F32);
        for (time, expected) in [&[Run::Now][..], &[Run::Recorded], &[], &[], &[]].into_iter().enumerate() {
            let x = upload(&b, ROWS, time, dtype);
            // Kept for two times, then another.
            let modulation = if time < 3 { same.clone() } else { upload(&b, 1, time, DType::F32) };
            let inputs = [&x, &modulation];
            let replayed = b.replay(&replays, &[], &inputs, |b, run, inputs| block.forward(b, run, inputs));
            assert_eq!(block.asked(), expected);
            let direct = block.forward(&b, Run::Now, &inputs).unwrap();
            block.asked();
            let (replayed, direct) = (b.download(&replayed.unwrap()).unwrap(), b.download(&direct).unwrap());
            assert!(replayed == direct, "{dtype}, fp8 {fp8}, call {time}");
            assert!(direct.to_f32().unwrap().iter().all(|v| v.is_finite()));
        }
    }
}

#[test]
fn whichever_way_is_chosen_the_bits_are_the_same() {
    let Some(b) = gpu(Graphs::Auto, None) else { return };
    let (block, replays) = (Block::new(&b, false), CudaReplays::default());
    let modulation = upload(&b, 1, 50, DType::F32);
    for seed in 0..8 {
        let x = upload(&b, ROWS, seed, DType::BF16);
        let work = |b: &CudaBackend, run, inputs: &[&CudaTensor]| block.forward(b, run, inputs);
        let replayed = b.replay(&replays, &[], &[&x, &modulation], work).unwrap();
        let direct = block.forward(&b, Run::Now, &[&x, &modulation]).unwrap();
        assert!(b.download(&replayed).unwrap() == b.download(&direct).unwrap(), "call {seed}");
    }
}

#[test]
fn results_stay_when_the_work_is_replayed_again() {
    let Some(b) = gpu(Graphs::Always, None) else { return };
    let (block, replays) = (Block::new(&b, false), CudaReplays::default());
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
fn work_of_another_kind_is_recorded_by_itself() {
    let Some(b) = gpu(Graphs::Always, None) else { return };
    let (block, replays) = (Block::new(&b, false), CudaReplays::default());
    let modulation = upload(&b, 1, 50, DType::F32);
    let mut last = None;
    // Another number of rows, another key.
    for (rows, key) in [(ROWS, 0), (ROWS + 5, 0), (ROWS, 1), (ROWS, 0), (ROWS + 5, 0), (ROWS, 1)] {
        let x = upload(&b, rows, key, DType::BF16);
        let work = |b: &CudaBackend, run, inputs: &[&CudaTensor]| block.forward(b, run, inputs);
        let y = b.replay(&replays, &[key], &[&x, &modulation], work).unwrap();
        assert_eq!(y.shape_rows(), rows);
        last = Some(block.asked());
    }
    assert_eq!(last, Some(vec![Run::Recorded]));
}

#[test]
fn what_can_not_be_recorded_is_done_as_usual() {
    let Some(b) = gpu(Graphs::Always, None) else { return };
    let (block, replays) = (Block::new(&b, false), CudaReplays::default());
    let x = upload(&b, ROWS, 9, DType::F32);
    let expected = [&[Run::Now][..], &[Run::Recorded, Run::Now], &[Run::Now], &[Run::Now]];
    for expected in expected {
        let replayed = b.replay(&replays, &[], &[&x], |b, run, inputs| {
            // From the host's memory. That the work does without it helps nobody: it would be without it every time.
            let modulation = b.upload(&values(1, 50), DType::F32);
            let modulation = modulation.or_else(|_| b.slice_rows(inputs[0], 0..1))?;
            block.forward(b, run, &[inputs[0], &modulation])
        });
        assert_eq!(block.asked(), expected);
        let modulation = upload(&b, 1, 50, DType::F32);
        let direct = block.forward(&b, Run::Now, &[&x, &modulation]).unwrap();
        block.asked();
        assert!(b.download(&replayed.unwrap()).unwrap() == b.download(&direct).unwrap());
    }
}

#[test]
fn whoever_counts_operations_sees_them_all_until_he_is_paused() {
    let Some(b) = gpu(Graphs::Always, None) else { return };
    let (b, replays) = (Timed::new(b), CudaReplays::default());
    let x = b.upload(&values(ROWS, 1), DType::BF16).unwrap();
    let counted = || {
        b.take();
        b.replay(&replays, &[], &[&x], |b, _, inputs| b.add(inputs[0], inputs[0])).unwrap();
        b.take().iter().map(|count| count.calls).sum::<u64>()
    };
    assert_eq!([counted(), counted(), counted()], [1; 3]);
    b.pause(true);
    assert_eq!([counted(), counted(), counted()], [0; 3]);
    assert_eq!(b.inner().replayed(), 2);
    b.pause(false);
    assert_eq!(counted(), 1);
}

#[test]
fn a_recording_keeps_the_weights_and_tensors_it_reads() {
    let Some(b) = gpu(Graphs::Always, None) else { return };
    let replays = CudaReplays::default();
    let (block, modulation) = (Block::new(&b, false), upload(&b, 1, 50, DType::F32));
    let (x, y) = (upload(&b, ROWS, 1, DType::BF16), upload(&b, ROWS, 2, DType::BF16));
    // The modulation is no input.
    let work =
        |b: &CudaBackend, run, inputs: &[&CudaTensor]| block.forward(b, run, &[inputs[0], &modulation]);
    let expected = b.download(&work(&b, Run::Now, &[&x]).unwrap()).unwrap();
    for _ in 0..2 {
        b.replay(&replays, &[], &[&y], work).unwrap();
    }
    assert_eq!(block.asked(), [Run::Now, Run::Now, Run::Recorded]);
    drop((block, modulation));
    // What was theirs would be others' now.
    let others: Vec<_> = (0..40).map(|seed| upload(&b, 3 * WIDTH, 100 + seed, DType::BF16)).collect();
    let small: Vec<_> = (0..40).map(|seed| upload(&b, 1, 100 + seed, DType::F32)).collect();
    let never = |_: &CudaBackend, _: Run, _: &[&CudaTensor]| -> Result<CudaTensor> { panic!("not replayed") };
    let replayed = b.replay(&replays, &[], &[&x], never).unwrap();
    assert!(b.download(&replayed).unwrap() == expected);
    drop((others, small));
}

#[test]
fn work_that_goes_past_the_backend_it_is_handed_is_not_recorded() {
    let Some(b) = gpu(Graphs::Always, None) else { return };
    let replays = CudaReplays::default();
    for seed in 0..4 {
        let x = upload(&b, ROWS, seed, DType::F32);
        let work = |handed: &CudaBackend, _: Run, inputs: &[&CudaTensor]| {
            let twice = b.add(inputs[0], inputs[0])?;
            handed.add(&twice, inputs[0])
        };
        let y = b.replay(&replays, &[], &[&x], work).unwrap();
        let direct = b.add(&b.add(&x, &x).unwrap(), &x).unwrap();
        assert!(b.download(&y).unwrap() == b.download(&direct).unwrap(), "call {seed}");
    }
    assert_eq!(b.replayed(), 0);
}

#[test]
fn a_backend_that_records_is_of_no_use_afterwards() {
    let Some(b) = gpu(Graphs::Always, None) else { return };
    let (replays, x) = (CudaReplays::default(), upload(&b, ROWS, 9, DType::F32));
    let mut kept = None;
    for _ in 0..3 {
        let work = |b: &CudaBackend, run: Run, inputs: &[&CudaTensor]| {
            kept = kept.take().or_else(|| (run == Run::Recorded).then(|| b.clone()));
            b.add(inputs[0], inputs[0])
        };
        b.replay(&replays, &[], &[&x], work).unwrap();
    }
    assert_eq!(b.replayed(), 2);
    assert!(kept.unwrap().add(&x, &x).is_err());
}

#[test]
fn an_error_of_the_work_is_the_callers() {
    let Some(b) = gpu(Graphs::Always, None) else { return };
    let (replays, x) = (CudaReplays::default(), upload(&b, ROWS, 9, DType::BF16));
    for _ in 0..3 {
        let wrong = |_: &CudaBackend, _: Run, _: &[&CudaTensor]| -> Result<CudaTensor> {
            Err(Error::Arguments { op: "test", what: "never".into() })
        };
        let error = b.replay(&replays, &[], &[&x], wrong).unwrap_err();
        assert!(matches!(error, Error::Arguments { op: "test", .. }), "{error}");
    }
    // And the GPU goes on.
    assert!(b.download(&x).is_ok());
}

#[test]
fn what_other_threads_do_meanwhile_is_not_recorded() {
    let Some(b) = gpu(Graphs::Always, None) else { return };
    let (block, replays) = (Block::new(&b, false), CudaReplays::default());
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
        let direct = block.forward(&b, Run::Now, &[&x, &modulation]).unwrap();
        assert!(b.download(&y.unwrap()).unwrap() == b.download(&direct).unwrap());
    }
    use Run::{Now, Recorded};
    assert_eq!(block.asked(), [Now, Now, Recorded, Now, Now]);
}

#[test]
fn the_memory_of_recordings_comes_back_with_their_owner() {
    let Some(b) = gpu(Graphs::Always, None) else { return };
    let block = Block::new(&b, false);
    let modulation = upload(&b, 1, 50, DType::F32);
    let replay = |replays: &CudaReplays, rows: usize| {
        let x = upload(&b, rows, 1, DType::BF16);
        b.replay(replays, &[], &[&x, &modulation], |b, run, inputs| block.forward(b, run, inputs)).unwrap();
    };
    let held = || {
        b.release_memory();
        b.memory_held()
    };
    replay(&CudaReplays::default(), ROWS);
    let before = held();
    let replays = CudaReplays::default();
    replay(&replays, ROWS);
    assert_eq!(held(), before);
    replay(&replays, ROWS);
    let one = held();
    assert!(one > before, "a recording keeps its memory");
    for rows in [ROWS, ROWS, ROWS] {
        replay(&replays, rows);
    }
    assert_eq!(held(), one, "replaying takes no more");
    // Of many kinds only the latest are kept.
    for rows in 1..8 {
        replay(&replays, ROWS + rows);
        replay(&replays, ROWS + rows);
    }
    assert!(held() - before < 4 * (one - before), "{before}, {one}, {}", held());
    drop(replays);
    assert_eq!(held(), before);
}

#[test]
fn memory_that_runs_out_is_taken_from_recordings_first() {
    const LIMIT: usize = 100 << 20;
    let Some(b) = gpu(Graphs::Always, Some(LIMIT)) else { return };
    let (block, replays) = (Block::new(&b, false), CudaReplays::default());
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
    assert_eq!(block.asked(), [Run::Now, Run::Recorded]);
    b.release_memory();
    let recorded = b.memory_held();
    assert!(recorded > without);
    // More than there is beside the recording.
    let rows = (LIMIT - (recorded + without) / 2) / (4 * WIDTH);
    let large = upload(&b, rows, 2, DType::F32);
    assert!(b.memory_held() <= LIMIT);
    drop(large);
    assert!(b.download(&replay()).unwrap() == direct);
    replay();
    assert_eq!(block.asked(), [Run::Now, Run::Now]);
}

#[test]
fn nothing_is_recorded_where_that_is_not_wanted_or_weights_take_turns() {
    let (Some(never), Some(always)) = (gpu(Graphs::Never, None), gpu(Graphs::Always, None)) else { return };
    let Some(limited) = gpu(Graphs::Auto, Some(200 << 20)) else { return };
    let parts = LinearParts::dense(vec![values(2 << 10, 1)]).unwrap();
    let _streamed = always.weight(parts, Residency::Host).unwrap();
    for b in [never, always, limited] {
        let (block, replays) = (Block::new(&b, false), CudaReplays::default());
        let (x, modulation) = (upload(&b, ROWS, 1, DType::BF16), upload(&b, 1, 50, DType::F32));
        for _ in 0..12 {
            let work = |b: &CudaBackend, run, inputs: &[&CudaTensor]| block.forward(b, run, inputs);
            b.replay(&replays, &[], &[&x, &modulation], work).unwrap();
        }
        assert_eq!(block.asked(), [Run::Now; 12]);
    }
}

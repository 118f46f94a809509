//! A session switches models and LoRAs as requests need them.

use std::path::Path;
use std::sync::Arc;

use kiln_engine::{
    BatchLimit, Error, Event, Explain, GeneratedImage, ImageCollector, LoraRef, Plan, Request, Session,
};
use kiln_golden::testdata;

use crate::recording_sink::{RecordingSink, SinkCall, Tiny, request, settings, tiny};

fn sink() -> Arc<RecordingSink> {
    Arc::default()
}

fn session() -> Session {
    Session::new(settings(), 4)
}

fn lora(weight: f32) -> LoraRef {
    LoraRef { path: testdata().join("tiny/lora/lora_diffusers.safetensors"), weight, sha256: None }
}

fn with_loras(loras: Vec<LoraRef>) -> Request {
    Request { loras, ..request("a cat", 1) }
}

/// Generates a plan with an engine of its own.
fn generate_alone(tiny: &Tiny, plan: &Arc<Plan>) -> Vec<GeneratedImage> {
    let mut engine = tiny.load();
    engine.set_loras(&plan.loras, plan.lora_partial).unwrap();
    let sink = sink();
    engine.generate(&[sink.task(plan)], &BatchLimit::ONE);
    engine.finish();
    sink.images()
}

#[track_caller]
fn assert_same(found: &[GeneratedImage], expected: &[GeneratedImage]) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        assert!(found.latents == expected.latents && found.image == expected.image);
    }
}

fn loading(call: &SinkCall) -> bool {
    matches!(call, SinkCall::Event(Event::Loading { .. }))
}

fn lora_report(call: &SinkCall) -> bool {
    matches!(call, SinkCall::Event(Event::LoraApplied { .. }))
}

#[test]
fn tasks_switch_the_model() {
    let (klein, base) = (tiny("klein"), tiny("klein-base"));
    let session = session();
    let plans = [
        klein.plan(&request("a cat", 1)),
        klein.plan(&request("a dog", 2)),
        base.plan(&request("a cat", 1)),
        klein.plan(&request("a tree", 3)),
    ];
    let sinks = plans.each_ref().map(|_| sink());
    let tasks: Vec<_> = sinks.iter().zip(&plans).map(|(sink, plan)| sink.task(plan)).collect();
    session.generate(&tasks);
    session.finish();
    // The first task of a model gets the loading events.
    assert_eq!(sinks.each_ref().map(|sink| sink.count(loading) > 0), [true, false, true, true]);
    // Consecutive tasks with the same model share a batch.
    let together = |call: &SinkCall| matches!(call, SinkCall::Event(Event::StepStarted { batch: 2, .. }));
    assert_eq!(sinks.each_ref().map(|sink| sink.count(together)), [3, 3, 0, 0]);
    for (sink, plan) in sinks.iter().zip(&plans) {
        let own = if Arc::ptr_eq(&plan.model, &klein.model) { &klein } else { &base };
        assert_same(&sink.images(), &generate_alone(own, plan));
    }
    let again = sink();
    session.generate(&[again.task(&plans[0])]);
    session.finish();
    assert_eq!(again.count(loading), 0);
    again.images();
    session.reset();
    session.generate(&[again.task(&plans[0])]);
    session.finish();
    assert!(again.count(loading) > 0);
    again.images();
}

#[test]
fn models_stay_loaded_within_the_limit_and_the_least_recently_used_one_goes() {
    let models = ["klein", "klein-base", "klein-kv"].map(tiny);
    let plans = models.each_ref().map(|tiny| tiny.plan(&request("a cat", 1)));
    let bytes = models.each_ref().map(|tiny| tiny.model.file_bytes());
    let session = session().with_model_memory(bytes[0] + bytes[1].max(bytes[2]));
    let loads = |plan: usize| {
        let sink = sink();
        session.generate(&[sink.task(&plans[plan])]);
        session.finish();
        let loaded = sink.count(loading) > 0;
        assert_same(&sink.images(), &generate_alone(&models[plan], &plans[plan]));
        loaded
    };
    assert_eq!([0, 1, 0, 1].map(loads), [true, true, false, false], "both fit");
    assert_eq!([0, 2, 0].map(loads), [false, true, false], "the third replaces the one used longest ago");
    assert!(loads(1));
    let names: Vec<_> = session.loaded().into_iter().map(|loaded| loaded.model.recorded_name()).collect();
    assert_eq!(names, [models[0].model.recorded_name(), models[1].model.recorded_name()]);
}

#[test]
fn tasks_with_different_loras_can_be_passed_in_one_call() {
    let klein = tiny("klein");
    let session = session();
    let sets =
        [vec![], vec![lora(1.0)], vec![lora(1.0)], vec![lora(0.5)], vec![lora(0.5), lora(1.0)], vec![]];
    let plans = sets.map(|loras| klein.plan(&with_loras(loras)));
    let sinks = plans.each_ref().map(|_| sink());
    let tasks: Vec<_> = sinks.iter().zip(&plans).map(|(sink, plan)| sink.task(plan)).collect();
    session.generate(&tasks);
    session.finish();
    assert_eq!(sinks.each_ref().map(|sink| sink.count(lora_report)), [0, 1, 0, 1, 2, 0]);
    let images: Vec<_> = sinks.iter().map(|sink| sink.images()).collect();
    for (found, plan) in images.iter().zip(&plans) {
        assert_same(found, &generate_alone(&klein, plan));
    }
    assert_same(&images[1], &images[2]);
    assert_same(&images[0], &images[5]);
    for (one, other) in [(0, 1), (1, 3), (3, 4)] {
        assert!(images[one][0].latents != images[other][0].latents, "the LoRA has no effect");
    }
    // The recipe has the LoRA's weight and fingerprint.
    let used = &images[3][0].recipe.request.loras;
    assert_eq!((used.len(), used[0].weight, used[0].sha256.is_some()), (1, 0.5, true));
}

#[test]
fn the_batch_capacity_is_known_once_the_model_is_loaded() {
    let (klein, base) = (tiny("klein"), tiny("klein-base"));
    let session = session();
    let plan = klein.plan(&request("a cat", 1));
    assert_eq!(session.batch_capacity(&plan), 1);
    session.load(&klein.model, &ImageCollector::default()).unwrap();
    assert_eq!(session.batch_capacity(&plan), 4);
    assert_eq!(session.batch_capacity(&base.plan(&request("a cat", 1))), 1);
    // More rows than pay off in a batch.
    let large = klein.plan(&Request { width: Some(4096), height: Some(4096), ..request("a cat", 1) });
    assert_eq!(session.batch_capacity(&large), 1);
    session.reset();
    assert_eq!(session.batch_capacity(&plan), 1);
}

/// A LoRA for a layer that the model doesn't have.
fn foreign_lora(folder: &Path) -> LoraRef {
    let path = folder.join("foreign.safetensors");
    let stem = "transformer.transformer_blocks.77.attn.to_q";
    let names = [format!("{stem}.lora_A.weight"), format!("{stem}.lora_B.weight")];
    let tensors = [
        (names[0].as_str(), kiln_tensor::HostTensor::zeros([1, 128])),
        (names[1].as_str(), kiln_tensor::HostTensor::zeros([128, 1])),
    ];
    kiln_weights::save::save(&path, &tensors, &Default::default()).unwrap();
    LoraRef { path, weight: 1.0, sha256: None }
}

#[test]
fn a_task_that_can_not_be_served_does_not_affect_the_others() {
    let folder = tempfile::tempdir().unwrap();
    let klein = tiny("klein");
    let session = session();
    let huge = Request { width: Some(65536), height: Some(65536), ..request("a cat", 1) };
    let plans = [
        with_loras(vec![lora(1.0)]),
        with_loras(vec![foreign_lora(folder.path())]),
        with_loras(vec![foreign_lora(folder.path())]),
        huge,
        request("a cat", 1),
        with_loras(vec![lora(1.0)]),
    ];
    let plans = plans.map(|request| klein.plan(&request));
    let sinks = plans.each_ref().map(|_| sink());
    let tasks: Vec<_> = sinks.iter().zip(&plans).map(|(sink, plan)| sink.task(plan)).collect();
    session.generate(&tasks);
    session.finish();
    let errors = [sinks[1].error().0.to_string(), sinks[2].error().0.to_string()];
    assert!(errors[0].contains("transformer_blocks.77") && errors[1] == errors[0], "{errors:?}");
    let (error, _) = sinks[3].error();
    assert!(matches!(error, Error::Memory { .. }), "{error:?}");
    for i in [0, 4, 5] {
        assert_same(&sinks[i].images(), &generate_alone(&klein, &plans[i]));
    }
}

#[test]
fn a_model_that_can_not_be_loaded_ends_all_of_its_tasks() {
    let (klein, broken) = (tiny("klein"), tiny("klein"));
    let plans = ["a cat", "a dog"].map(|prompt| broken.plan(&request(prompt, 1)));
    // The weights are not open yet.
    let file = broken.model.transformer.path.join("diffusion_pytorch_model.safetensors");
    std::fs::remove_file(&file).unwrap();
    let session = session();
    let sinks = [sink(), sink(), sink()];
    let good = klein.plan(&request("a cat", 1));
    session.generate(&[sinks[0].task(&plans[0]), sinks[1].task(&plans[1]), sinks[2].task(&good)]);
    session.finish();
    let errors = [sinks[0].error().0, sinks[1].error().0];
    assert_eq!(errors[0].to_string(), errors[1].to_string());
    assert!(matches!(errors[1], Error::Load(_)), "{errors:?}");
    assert_eq!(sinks[2].images().len(), 1);
}

#[test]
fn a_sink_that_panics_while_the_model_is_loaded_ends_once() {
    let klein = tiny("klein");
    let session = session();
    let plan = klein.plan(&request("a cat", 1));
    let panicking = || {
        let on_event = |event: &Event| assert!(!matches!(event, Event::Loading { .. }), "on purpose");
        Arc::new(RecordingSink { on_event: Box::new(on_event), ..RecordingSink::default() })
    };
    let (first, second) = (panicking(), sink());
    session.generate(&[first.task(&plan), second.task(&plan)]);
    session.finish();
    assert!(matches!(first.error().0, Error::Panicked(_)));
    assert_eq!(second.images().len(), 1);
    session.reset();
    // Even if the first sink panics at its end, the others are ended.
    let worse = Arc::new(RecordingSink {
        on_event: Box::new(|_| panic!("on purpose")),
        on_ended: Box::new(|_| panic!("again")),
        ..RecordingSink::default()
    });
    session.generate(&[worse.task(&plan), second.task(&plan)]);
    session.finish();
    assert_eq!(second.images().len(), 1);
}

#[test]
fn cancelling_while_the_model_is_loaded_ends_only_that_task() {
    let klein = tiny("klein");
    let session = session();
    let plan = klein.plan(&request("a cat", 1));
    let sinks = [sink(), sink()];
    sinks[0].cancel.store(true, std::sync::atomic::Ordering::SeqCst);
    session.generate(&sinks.each_ref().map(|sink| sink.task(&plan)));
    session.finish();
    assert!(sinks[0].error().0.is_cancelled());
    assert_eq!(sinks[1].images().len(), 1);
    // No task is left.
    session.reset();
    session.generate(&[sinks[0].task(&plan)]);
    assert!(sinks[0].error().0.is_cancelled());
}

#[test]
fn tasks_end_once_while_others_reset_and_change_the_model() {
    let (klein, base) = (tiny("klein"), tiny("klein-base"));
    let session = session();
    std::thread::scope(|scope| {
        for thread in 0..3 {
            let (session, klein, base) = (&session, &klein, &base);
            scope.spawn(move || {
                for round in 0..4 {
                    let tiny = if (thread + round) % 2 == 0 { klein } else { base };
                    let plan = tiny.plan(&request("a cat", 1));
                    let sinks = [sink(), sink()];
                    session.generate(&sinks.each_ref().map(|sink| sink.task(&plan)));
                    if thread == 2 {
                        session.reset();
                    }
                    session.finish();
                    for sink in &sinks {
                        assert!(sink.wait_for(1, crate::recording_sink::is_end));
                        assert_eq!(sink.images().len(), 1);
                    }
                }
            });
        }
    });
}

//! NaN and infinity end a request with an error that says where they appeared.

use std::sync::Arc;

use kiln_engine::{Error, Event, Request, Session};
use kiln_tensor::HostTensor;
use kiln_weights::save;

use crate::recording_sink::{RecordingSink, SinkCall, request, settings, tiny};

#[test]
fn latents_that_are_not_finite_end_the_request_and_name_the_step() {
    let klein = tiny("klein");
    let folder = tempfile::tempdir().unwrap();
    let embeds = folder.path().join("embeds.safetensors");
    let values = HostTensor::from_f32([32, 48], vec![f32::MAX; 32 * 48]).unwrap();
    save::save(&embeds, &[("prompt_embeds", values)], &Default::default()).unwrap();
    let good = klein.plan(&request("a cat", 1));
    let bad = Request { prompts: Vec::new(), embeds: Some(embeds.into()), ..request("", 2) };
    let bad = klein.plan(&bad);
    let session = Session::new(settings(), 4);
    let sinks = [(); 2].map(|()| Arc::<RecordingSink>::default());
    session.generate(&[sinks[0].task(&good), sinks[1].task(&bad)]);
    session.finish();
    // It ends with the step after, not with the last one.
    let steps = |call: &SinkCall| matches!(call, SinkCall::Event(Event::StepFinished { .. }));
    assert_eq!(sinks.each_ref().map(|sink| sink.count(steps)), [3, 1]);
    let (error, images) = sinks[1].error();
    assert_eq!(images, 0);
    assert!(matches!(error, Error::Model(kiln_nn::Error::NotFinite { .. })), "{error}");
    assert_eq!(error.to_string(), "the latent after step 1 of 3 is not finite: it holds NaN or infinity");
    assert_eq!(sinks[0].images().len(), 1, "the other request of the batch is not affected");
}

#[test]
fn a_decoded_image_that_is_not_finite_is_an_error() {
    let klein = tiny("klein");
    let session = Session::new(settings(), 1);
    let huge = HostTensor::from_f32([16, 128], vec![1e30; 16 * 128]).unwrap();
    let decoded = session.with_engine(&klein.model, &RecordingSink::default(), |engine| {
        engine.decode_latents(&huge, [4, 4], None, &RecordingSink::default())
    });
    let error = decoded.unwrap_err();
    assert!(matches!(error, Error::Model(kiln_nn::Error::NotFinite { .. })), "{error}");
    assert_eq!(error.to_string(), "the decoded image is not finite: it holds NaN or infinity");
}

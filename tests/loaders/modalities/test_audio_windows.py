"""Windows, long clips and waveforms: what is counted from a header is what decoding yields."""

from __future__ import annotations

import io

import numpy as np
import pytest
import soundfile
import torch
from float_bounds import assert_log_mel_close, assert_standard_scores_close
from shard_factory import audio, write_shard

import orchdata as od
from orchdata.loaders.modalities.audio import mel_bands

pytestmark = pytest.mark.cpus

LIMITS = od.Limits()
SECONDS = 2
WINDOW = SECONDS * 16_000


def recipe(**given):
    return od.AudioPreprocessor(**{"num_mels": 40, "window_seconds": SECONDS, **given})


def noise(num_samples):
    return (np.random.default_rng(num_samples).normal(size=num_samples) * 0.1).astype(np.float32)


def decoded(pre, wave):
    """Size and features of a clip at 16 kHz."""
    file = io.BytesIO()
    soundfile.write(file, wave, 16_000, format="WAV", subtype="FLOAT")
    size = pre.count_header((len(wave), 16_000), LIMITS)
    out = np.full((size.rows, *pre.row_shape), 7, np.float32)
    pre.decode_into(file.getvalue(), size, {"features": out}, LIMITS)
    return size, out


def whole_window(wave, num_samples):
    """The twin: Whisper's log-mel spectrogram of a clip followed by zeros, computed in full."""
    padded = torch.zeros(num_samples)
    padded[: len(wave)] = torch.from_numpy(wave)
    stft = torch.stft(padded, 400, 160, window=torch.hann_window(400), return_complex=True)
    power = (stft[..., :-1].abs() ** 2).contiguous()
    log = torch.clamp(torch.from_numpy(mel_bands(40, 400, 16_000)).float().T @ power, min=1e-10).log10()
    return ((torch.maximum(log, log.max() - 8.0) + 4.0) / 4.0).T.numpy()


@pytest.mark.parametrize("num_samples", [321, 5_000, 16_077, WINDOW - 401, WINDOW - 400, WINDOW - 1, WINDOW])
def test_a_window_is_whispers_with_silence_after_the_clip(num_samples):
    wave = noise(num_samples)
    size, out = decoded(recipe(fill="window"), wave)
    assert_log_mel_close(out, whole_window(wave, WINDOW)[None])
    own = -(-num_samples // 160)
    assert (size.positions, size.tokens, size.rows, size.extent) == (100, -(-own // 2) // 2, 1, (num_samples, own))
    _, alone = decoded(recipe(fill="none"), wave)
    np.testing.assert_array_equal(alone, out[0, :own])


@pytest.mark.parametrize("num_samples", [1, 100, 16_000, 16_077, 40_000])
def test_any_length_is_whispers_with_silence_after_the_clip(num_samples):
    wave = noise(num_samples)
    size, out = decoded(recipe(window_seconds=None), wave)
    assert_log_mel_close(out, whole_window(wave, 60_000)[: size.rows])


def test_the_highest_value_counts_where_only_a_frame_after_the_last_token_has_it():
    wave = np.zeros(640, np.float32)  # a token of 4 frames: the 5th, from 440 to 840, sees the end best
    wave[630:] = 0.5
    _, out = decoded(recipe(window_seconds=None), wave)
    assert_log_mel_close(out, whole_window(wave, 60_000)[:4])
    with pytest.raises(AssertionError, match="times the bound"):  # the twin of the clip alone
        assert_log_mel_close(out, whole_window(wave, 640))


@pytest.mark.parametrize("fill", ["token", "none", "window"])
@pytest.mark.parametrize("num_samples", [WINDOW + 1, 2 * WINDOW, 2 * WINDOW + 400, 2 * WINDOW + 9_000])
def test_long_clips_are_cut_or_split_into_windows_of_their_own(fill, num_samples):
    wave = noise(num_samples)
    cut_size, cut = decoded(recipe(fill=fill, long_clips="cut"), wave)
    pre = recipe(fill=fill, long_clips="split")
    size, split = decoded(pre, wave)
    pieces = [wave[start : start + WINDOW] for start in range(0, num_samples, WINDOW)]
    if fill != "token" and len(pieces[-1]) < 321:
        pieces.pop()
    alone = [decoded(recipe(fill=fill), piece) for piece in pieces]
    np.testing.assert_array_equal(split, np.concatenate([out for _, out in alone]))
    np.testing.assert_array_equal(cut, alone[0][1])
    for name in ("positions", "tokens", "rows"):
        assert getattr(size, name) == sum(getattr(each, name) for each, _ in alone)
        assert getattr(cut_size, name) == getattr(alone[0][0], name)
    assert pre.extras([size])["window_lengths"].tolist() == [each.extent[1] for each, _ in alone]


def wav2vec_positions(num_samples):
    """Of wav2vec 2.0's convolutions, layer by layer."""
    for kernel, stride in zip((10, 3, 3, 3, 3, 2, 2), (5, 2, 2, 2, 2, 2, 2), strict=True):
        num_samples = (num_samples - kernel) // stride + 1
    return num_samples


@pytest.mark.parametrize("fill", ["token", "none", "window"])
def test_a_waveform_is_its_samples(fill):
    shape = {"hop_length": 320, "n_fft": 400, "conv_stride": 1, "tokens_per_second": 50}
    pre = recipe(features="waveform", fill=fill, **shape)
    for num_samples in (400, 719, 720, 16_000, 16_077):
        wave = noise(num_samples)
        size, out = decoded(pre, wave)
        np.testing.assert_array_equal(out.ravel()[:num_samples], wave)
        assert not out.ravel()[num_samples:].any()
        assert size.positions == wav2vec_positions(out.shape[-1])
        if fill == "token":
            assert size.tokens == size.positions == -(-num_samples // 320)
        else:
            assert size.tokens == wav2vec_positions(num_samples)
            assert out.shape == ((1, WINDOW) if fill == "window" else (num_samples,))


def test_a_normalized_waveform_has_mean_0_and_variance_1():
    wave = noise(9_000) + 0.25
    _, out = decoded(recipe(features="normalized_waveform", fill="window"), wave)
    expected = (wave - wave.mean()) / np.sqrt(wave.var() + 1e-7)
    assert_standard_scores_close(out[0, :9_000], expected)
    assert not out[0, 9_000:].any()


def test_costs_count_the_padded_window_and_tokens_the_clip(tmp_path):
    samples = [{"__key__": f"{n}", "wav": audio(0.5 + n / 2), "txt": b"word"} for n in range(2)]
    samples.append({"__key__": "2", "wav": audio(3.0), "txt": b"word"})
    whole = od.Recipe(image=None, audio=recipe(fill="window", long_clips="split"))
    dataset = od.ShardDataset(write_shard(tmp_path / "clips.tar", samples), recipe=whole)
    index = dataset.index()
    assert index.part_positions.tolist() == [100, 100, 200]
    assert index.part_tokens.tolist() == [12, 25, 75]  # 25 a second; half of the 13th is not there
    (batch,) = od.DataLoader(dataset, batch_size=3, num_threads=0)
    assert batch.audio.features.shape == (4, 200, 40)
    assert batch.audio.window_lengths.tolist() == [50, 100, 200, 100]
    assert batch.audio.cu_seqlens.tolist() == [0, 1, 2, 4]
    (samples,) = od.DataLoader(dataset, batch_size=3, num_threads=0, collate_fn=list)
    assert [sample.parts[0].extras["window_lengths"] for sample in samples] == [50, 100, (200, 100)]

"""The equilibria of the trained digits model from 200 starts, with their spectra.

    python -m tests.benchmarks.survey_digits

Half of the starts are held-out images with half of their patches hidden, a quarter is one image
under many masks, a quarter random tokens. Prints the equilibria, the processor time of each part,
whether a second run is the same bit by bit, and how far dense and matrix-free eigenvalues differ.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import torch
import xarray as xr

import etdyn as ed
from etdyn.analysis.equilibria import survey
from etdyn.analysis.spectrum import spectrum
from etdyn.datasets import digits
from etdyn.tasks import evaluation_masks

STARTS = 200
LOWEST = 10  # equilibria with a dense spectrum
ENDS = 6  # eigenvalues at each end of the others


@torch.no_grad()
def trained(count: int = STARTS, seed: int = 0) -> tuple[ed.System, torch.Tensor]:
    """The trained system and its starts."""
    model = ed.load_model(Path(__file__).parents[2] / "data" / "digits").double()
    quarter, images = count // 4, digits().test.double()
    chosen = torch.cat([images[: 2 * quarter], images[:1].expand(quarter, -1, -1, -1)])
    masked = model.tokens(chosen, evaluation_masks(len(chosen), model.patches, seed))
    draw = torch.Generator().manual_seed(seed)
    random = torch.randn(count - 3 * quarter, *masked.shape[1:], generator=draw).double()
    return model.system, torch.cat([masked, random])


def measure(count: int = STARTS, seed: int = 0) -> tuple[xr.Dataset, dict[str, float]]:
    """The survey with spectra; processor seconds, and the largest gap of dense and matrix-free."""
    system, starts = trained(count, seed)
    began = time.process_time()
    found = survey(system, starts, symmetry="permutation")
    surveyed = time.process_time()
    states = torch.from_numpy(found["state"].values)
    leaky = system.with_dynamics("leaky")
    ends = spectrum(leaky, states, ENDS)["eigenvalue"].values
    dense = spectrum(leaky, states[:LOWEST])["eigenvalue"].values
    finished = time.process_time()
    both = np.concatenate([dense[:, :ENDS], dense[:, -ENDS:]], 1)
    gap = float(np.abs(ends[:LOWEST] - both).max())
    found["eigenvalue"] = (("equilibrium", "mode"), ends, {"units": "1", "long_name": "kappa"})
    return found, {"survey": surveyed - began, "spectra": finished - surveyed, "gap": gap}


def main() -> None:
    """Print the table and the verdicts."""
    torch.set_num_threads(1)
    found, took = measure()
    again, _ = measure()
    columns = ["energy", "index", "flat", "lowest", "highest", "isolated", "count"]
    print(found[[*columns, "basin_fraction"]].to_dataframe().to_string())
    print(f"unconverged {int((found['label'] < 0).sum())}, unseen {float(found['unseen']):.3g}")
    print({name: f"{value:.3g}" for name, value in took.items()})
    print("repeats exactly:", found.drop_attrs().identical(again.drop_attrs()))


if __name__ == "__main__":
    main()

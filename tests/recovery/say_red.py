"""Say to the controller that a node is red: `say_red.py JOB NODE`. Prints what it is answered."""

import secrets
import sys

from gemini_hpc.config import load_site_settings
from gemini_hpc.wire import controller
from gemini_hpc.wire.handshake import HandshakeClient, HandshakeError
from gemini_hpc.wire.link import BlockingLink, LinkClosed

settings, job = load_site_settings(), int(sys.argv[1])
(host,) = settings.list_controller_hosts()
client = HandshakeClient(
    purpose=controller.HEALTH,
    cluster=settings.cluster_name,
    job=job,
    restart=0,
    source=sys.argv[2],
    target=host,
    instance=secrets.token_hex(8),
    server_uid=settings.find_slurm_uid(),
)
try:
    link = BlockingLink.connect(host, settings.controller_port, client)
    link.send(controller.RedNode(job, 0, controller.HealthVerdict.RED))
    print(link.receive(controller.Notice).text)
except HandshakeError as error:
    print(error)
except LinkClosed:
    print("LinkClosed")

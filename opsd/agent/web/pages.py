"""The pages for people. Imported once somebody asks for one: an agent that is only scraped need not load them."""

from __future__ import annotations

from opsd.agent.web.fleet_page import ALONE as ALONE
from opsd.agent.web.fleet_page import fleet_page as fleet_page
from opsd.agent.web.guides import runbook_list as runbook_list
from opsd.agent.web.guides import runbook_page as runbook_page
from opsd.agent.web.html import HEADERS as HEADERS
from opsd.agent.web.html import problem_page as problem_page
from opsd.agent.web.incident_page import incident_page as incident_page
from opsd.agent.web.job_page import job_page as job_page
from opsd.agent.web.job_page import node_of_job as node_of_job
from opsd.agent.web.node_page import REFRESH_S as REFRESH_S
from opsd.agent.web.node_page import node_page as node_page
